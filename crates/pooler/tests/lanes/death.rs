// SPDX-License-Identifier: Apache-2.0
//! A pooler that is killed: nothing of it stays in the kernel, and its clients see the end.

use std::collections::BTreeSet;
use std::io::Read as _;

use libbpf_rs::query::{LinkInfoIter, MapInfoIter, ProgInfoIter};

use super::memory::login;
use super::*;

/// A BPF object of the kernel: what it is, as in /proc/PID/fdinfo, and its number, which no other gets for a long time.
type Object = (&'static str, u32);

const KINDS: [&str; 3] = ["prog_id", "map_id", "link_id"];

/// All there are.
fn in_kernel() -> BTreeSet<Object> {
    let programs = ProgInfoIter::default().map(|info| (KINDS[0], info.id));
    let maps = MapInfoIter::default().map(|info| (KINDS[1], info.id));
    let links = LinkInfoIter::default().map(|info| (KINDS[2], info.id));
    programs.chain(maps).chain(links).collect()
}

/// Those that a process has descriptors of.
fn of_process(pid: u32) -> BTreeSet<Object> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).expect("fdinfo");
    let texts = files.filter_map(|file| std::fs::read_to_string(file.ok()?.path()).ok());
    let numbers = |text: String| {
        let of_kind = |kind| {
            let line = text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(':'));
            Some((kind, line?.trim().parse().ok()?))
        };
        // The descriptor of a link tells its program, too.
        KINDS.into_iter().filter_map(of_kind).collect::<Vec<Object>>()
    };
    texts.flat_map(numbers).collect()
}

#[test]
fn nothing_of_a_killed_pooler_stays_in_the_kernel() -> Result<()> {
    let before = std::cell::RefCell::new(BTreeSet::new());
    each_lane(
        |ini| {
            if underpass_testkit::service_user().is_some() {
                before.replace(in_kernel());
            }
            ini
        },
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            let begun = Instant::now();
            while carried(pooler, lane)? == 0 {
                assert!(begun.elapsed() < Duration::from_secs(10), "the lane carries nothing");
                value(&mut a, "select 1")?;
            }
            // A backend that is busy keeps its socket for a while, and with it nothing of the pooler's.
            a.send(&Batch::new().query("select pg_sleep(60)"))?;
            let ours = of_process(pooler.pid());
            println!("lane {lane}: {ours:?}");
            for kind in KINDS {
                assert!(ours.iter().any(|(its, _)| *its == kind), "lane {lane}: no {kind}");
            }
            assert!(ours.is_subset(&in_kernel()), "lane {lane}");
            assert!(ours.is_disjoint(&before.borrow()), "lane {lane}");
            pooler.kill()?;
            let begun = Instant::now();
            loop {
                let left: BTreeSet<Object> = in_kernel().intersection(&ours).copied().collect();
                if left.is_empty() {
                    break;
                }
                assert!(begun.elapsed() < Duration::from_secs(20), "lane {lane}: {left:?} stay");
                std::thread::sleep(Duration::from_millis(20));
            }
            pooler.start_again()
        },
    )
}

/// A reset, which nobody takes for the end of a response.
#[test]
fn clients_of_a_killed_pooler_see_a_reset() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, lane| {
            let mut idle = login(pooler.port()).expect("a login");
            let mut a = client(pooler)?;
            for _ in 0..20 {
                value(&mut a, "select 1")?;
            }
            pooler.kill()?;
            idle.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
            let end = idle.read(&mut [0; 16]);
            let is_reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
            assert!(end.as_ref().is_err_and(is_reset), "lane {lane}: {end:?}");
            let end = a.recv();
            let is_told = |error: &underpass_testkit::Error| matches!(error, underpass_testkit::Error::Io { source, .. } if is_reset(source));
            assert!(end.as_ref().is_err_and(is_told), "lane {lane}: {end:?}");
            pooler.start_again()
        },
    )
}
