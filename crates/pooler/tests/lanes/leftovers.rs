// SPDX-License-Identifier: Apache-2.0
//! What a transaction leaves on its server, which no protocol message reports: the next client meets it with lanes exactly as without.

use super::*;

/// What two clients of one server see of each other's leftovers in transaction pooling.
fn observe(pooler: &Underpass) -> Result<Vec<String>> {
    let (mut a, mut b) = (client(pooler)?, client(pooler)?);
    for _ in 0..20 {
        value(&mut a, "select 1")?;
        value(&mut b, "select 1")?;
    }
    let mut seen = Vec::new();
    a.query("set work_mem = '7MB'")?.ok()?;
    seen.push(format!("work_mem {} {}", value(&mut a, "show work_mem")?, value(&mut b, "show work_mem")?));
    a.query("create temp table left_over (x int)")?.ok()?;
    b.query("insert into left_over values (1)")?.ok()?;
    seen.push(format!("temp {}", value(&mut a, "select count(*) from left_over")?));
    a.query("select pg_advisory_lock(7)")?.ok()?;
    let held = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()";
    seen.push(format!("locks {} {}", value(&mut a, held)?, value(&mut b, held)?));
    seen.push(format!("unlock {}", value(&mut b, "select pg_advisory_unlock(7)")?));
    a.query("listen news")?.ok()?;
    // Who is linked to the listening server when it speaks hears it.
    for (name, client) in [("a", &mut a), ("b", &mut b)] {
        seen.push(format!("notify by {name}: {}", client.query("notify news, 'text'")?.ok()?.tags()));
    }
    let listening = "select count(*) from pg_listening_channels()";
    seen.push(format!("listening {} {}", value(&mut a, listening)?, value(&mut b, listening)?));
    b.query("discard all")?.ok()?;
    let left = "select current_setting('work_mem') || coalesce(to_regclass('left_over')::text, ' none')";
    seen.push(format!("discarded {} {}", value(&mut a, left)?, value(&mut b, left)?));
    Ok(seen)
}

#[test]
fn what_is_left_on_a_server_is_there_as_without_lanes() -> Result<()> {
    let one = |ini: Ini| ini.set("default_pool_size", "1");
    let server = Postgres::start()?;
    let base = one(Ini::for_server(&server).set("pool_mode", "transaction"));
    let without = observe(&Underpass::start(&base.tail("[underpass]\nkernel_path = off"))?)?;
    println!("{without:#?}");
    assert_eq!(without[0], "work_mem 7MB 7MB");
    each_lane(one, |_, pooler, lane| {
        assert_eq!(observe(pooler)?, without, "lane {lane}");
        let carried = carried(pooler, lane)?;
        println!("lane {lane}: {carried} transactions in it");
        assert!(carried >= 40, "lane {lane}: {carried}");
        Ok(())
    })
}
