// SPDX-License-Identifier: Apache-2.0
//! `underpass check`: what this kernel and this process may do.

use std::process::ExitCode;

use underpass_sockmap::Lane;
use underpass_sockmap::selftest::{self, Report};

/// Lines of the verifier's log that are shown.
const LOG_LINES: usize = 16;

/// Runs the self-test of the kernel lanes and prints it. Success if at least one lane works.
pub fn run() -> ExitCode {
    let report = selftest::run();
    print!("{}", text(&report, is_measuring()));
    if report.works(Lane::D) || report.works(Lane::A) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether the kernel measures BPF programs; not when one keeps it to himself by a descriptor.
fn is_measuring() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").is_ok_and(|text| text.trim() == "1")
}

fn text(report: &Report, is_measuring: bool) -> String {
    let missing = report.privileges.missing();
    let mut text = format!("kernel        {}\n", report.kernel);
    text += &format!(
        "capabilities  {}\n",
        if missing.is_empty() { "complete".to_owned() } else { format!("missing {}", missing.join(", ")) }
    );
    let mut told = false;
    for feature in &report.features {
        let state = if feature.works { "works" } else { "fails" };
        text += &format!("{:<12}  {state}", feature.name);
        if let Some(cost) = feature.cost {
            text += &format!(", {:.1} us a round trip", cost.as_secs_f64() * 1e6);
        }
        let mut why = feature.why_not.lines();
        if let Some(first) = why.next() {
            text += &format!(": {first}");
        }
        text.push('\n');
        // Why the verifier refused is at the end of its log, which all that need the programs have in common.
        if !told {
            let log: Vec<&str> = why.collect();
            for line in &log[log.len().saturating_sub(LOG_LINES)..] {
                text += &format!("              {line}\n");
                told = true;
            }
        }
    }
    text += match (report.works(Lane::D), report.works(Lane::A)) {
        (true, true) => "lanes         D for any server, A for servers on this host (same_host = server)",
        (true, false) => "lanes         D for any server",
        (false, true) => "lanes         A for servers on this host (same_host = server)",
        (false, false) => "lanes         none: all traffic goes through user space",
    };
    if report.works(Lane::B) {
        text += ", B for applications on this host too (same_host = both)";
    }
    text.push('\n');
    if report.works(Lane::D) || report.works(Lane::A) {
        text += if is_measuring {
            "statistics    on: SHOW KERNEL and the metrics tell what the programs cost\n"
        } else {
            "statistics    off: what the programs cost is told after `sysctl -w kernel.bpf_stats_enabled=1`, or with lane_statistics = 1\n"
        };
    }
    // Nothing that a kernel could have or lack: docs/lanes.md, "Unix sockets".
    let by_tcp = match (report.works(Lane::D), report.works(Lane::A)) {
        (_, true) => "A",
        (true, false) => "D",
        (false, false) => return text,
    };
    text += &format!(
        "unix sockets  in user space, because the kernel bounds nothing that a program passes on from them; a server of this \
         host at host = 127.0.0.1 has lane {by_tcp}\n"
    );
    text
}

#[cfg(test)]
mod tests {
    use underpass_sockmap::selftest::{Feature, Privileges};

    use super::*;

    #[test]
    fn the_report_names_what_is_missing_and_why() {
        let report = Report {
            kernel: "6.1.0".into(),
            privileges: Privileges { bpf: false, net_admin: true, perfmon: true, sys_ptrace: true },
            features: vec![Feature {
                name: "load programs",
                works: false,
                why_not: "not permitted\nmore".into(),
                cost: None,
            }],
        };
        let text = text(&report, false);
        assert!(text.contains("missing CAP_BPF\n"), "{text}");
        assert!(text.contains("load programs  fails: not permitted\n"), "{text}");
        assert!(text.contains("none: all traffic"), "{text}");
        assert!(!text.contains("unix sockets") && !text.contains("statistics"), "{text}");
    }

    #[test]
    fn what_unix_sockets_have_instead_of_a_lane_is_said() {
        let works = |name| Feature { name, works: true, why_not: String::new(), cost: None };
        let mut report = Report {
            kernel: "6.18.0".into(),
            privileges: Privileges { bpf: true, net_admin: true, perfmon: true, sys_ptrace: true },
            features: vec![works("lane D")],
        };
        assert!(text(&report, false).contains("unix sockets  in user space"), "{}", text(&report, false));
        assert!(text(&report, false).contains("has lane D\n"), "{}", text(&report, false));
        assert!(text(&report, false).contains("kernel.bpf_stats_enabled=1"));
        assert!(text(&report, true).contains("statistics    on"));
        report.features.push(works("lane A"));
        assert!(text(&report, false).contains("has lane A\n"), "{}", text(&report, false));
    }
}
