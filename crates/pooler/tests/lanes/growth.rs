// SPDX-License-Identifier: Apache-2.0
//! Pools grow to what their clients need, although the programs serve these without telling anybody.

use super::*;

/// Stops the pooler, has `asks` come up because `holds` has the server that it needs, and ends that transaction before the pooler looks: what
/// otherwise is a matter of microseconds. Returns what `asks` is answered.
fn comes_back_before_user_space_looks(
    pooler: &Underpass,
    holds: &mut Client,
    asks: &mut Client,
) -> Result<String> {
    assert_eq!(holds.query("begin")?.ok()?.status(), Some(b'T'));
    pooler.signal(Signal::SIGSTOP)?;
    asks.send(&Batch::new().query("select pg_backend_pid()"))?;
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(holds.query("commit")?.ok()?.status(), Some(b'I'));
    pooler.signal(Signal::SIGCONT)?;
    Ok(asks.response()?.ok()?.value().unwrap_or_default().to_owned())
}

/// Without a lane the client would have waited, and a connection been opened for it.
#[test]
fn a_pool_that_programs_find_empty_grows_to_its_peak() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, lane| {
            let named = pooler.options("postgres", "postgres").parameter("application_name", "named");
            let (mut a, mut b) = (Client::connect(&named)?, Client::connect(&named)?);
            // They take turns, so they share one.
            let backend = "select pg_backend_pid()";
            let first = value(&mut a, backend)?;
            for _ in 0..5 {
                assert_eq!(
                    (value(&mut a, backend)?, value(&mut b, backend)?),
                    (first.clone(), first.clone())
                );
            }
            let idle = || {
                let rows = pooler.console("show servers")?.rows();
                Ok::<_, underpass_testkit::Error>(
                    rows.iter().filter(|row| row.contains(&Some("idle".into()))).count(),
                )
            };
            assert_eq!(idle()?, 1, "lane {lane}");

            let figures = || {
                Ok::<_, underpass_testkit::Error>((
                    kernel(pooler, "no_server", "xacts")?,
                    kernel(pooler, "unfit", "xacts")?,
                ))
            };
            let (none, unfit) = figures()?;
            assert_eq!(comes_back_before_user_space_looks(pooler, &mut a, &mut b)?, first, "lane {lane}");
            assert_eq!(figures()?, (none + 1, unfit), "lane {lane}");
            let start = Instant::now();
            while idle()? < 2 {
                assert!(start.elapsed() < Duration::from_secs(20), "lane {lane}: the pool does not grow");
                std::thread::sleep(Duration::from_millis(10));
            }

            // The new one has the parameters that it was opened with, and user space gives it to the first for whom a program finds nothing else.
            let second = comes_back_before_user_space_looks(pooler, &mut a, &mut b)?;
            assert_ne!(second, first, "lane {lane}");
            assert_eq!(figures()?, (none + 1, unfit + 1), "lane {lane}");
            // From then on the two of them are enough for the two clients, in their lane.
            assert_eq!(comes_back_before_user_space_looks(pooler, &mut a, &mut b)?, second, "lane {lane}");
            assert_eq!(figures()?, (none + 1, unfit + 1), "lane {lane}");
            assert_eq!(idle()?, 2, "lane {lane}");
            Ok(())
        },
    )
}
