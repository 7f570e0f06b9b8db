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
    print!("{}", text(&report));
    if report.works(Lane::D) || report.works(Lane::A) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn text(report: &Report) -> String {
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
        let text = text(&report);
        assert!(text.contains("missing CAP_BPF\n"), "{text}");
        assert!(text.contains("load programs  fails: not permitted\n"), "{text}");
        assert!(text.contains("none: all traffic"), "{text}");
        assert!(!text.contains("unix sockets"), "{text}");
    }

    #[test]
    fn what_unix_sockets_have_instead_of_a_lane_is_said() {
        let works = |name| Feature { name, works: true, why_not: String::new(), cost: None };
        let mut report = Report {
            kernel: "6.18.0".into(),
            privileges: Privileges { bpf: true, net_admin: true, perfmon: true, sys_ptrace: true },
            features: vec![works("lane D")],
        };
        assert!(text(&report).contains("unix sockets  in user space"), "{}", text(&report));
        assert!(text(&report).contains("has lane D\n"), "{}", text(&report));
        report.features.push(works("lane A"));
        assert!(text(&report).contains("has lane A\n"), "{}", text(&report));
    }
}
