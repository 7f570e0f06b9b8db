// SPDX-License-Identifier: Apache-2.0
//! Pages in a real browser.

use std::path::Path;
use std::process::Command;

/// As wide as a phone and as a desk, pixels.
const WINDOWS: [&str; 2] = ["390,844", "1400,900"];

/// Opens a page of ours without a network in a real browser, if one is installed: every plot is drawn, and the page is not wider than its
/// window. Says so on standard error where there is none.
///
/// # Panics
///
/// If the page has no plot, or the browser does not draw them all, or has to scroll sideways.
pub fn assert_every_plot_is_drawn(path: &Path) {
    let page = std::fs::read_to_string(path).expect("the page");
    let plots = page.matches("<div class=\"chart\"").count();
    assert!(plots > 0, "{}: no plot", path.display());
    // What the browser made of the page's width goes into the document that it prints.
    let measure = "<script>addEventListener('load', () => document.body.append('width ' + \
                   (document.documentElement.scrollWidth - innerWidth) + ' over'))</script></body>";
    // The library's text may have such words too: the last are the page's.
    let (before, after) = page.rsplit_once("</body>").expect("the page's end");
    let folder = tempfile::tempdir().expect("a directory");
    let measured = folder.path().join("measured.html");
    std::fs::write(&measured, format!("{before}{measure}{after}")).expect("a copy of the page");
    for window in WINDOWS {
        let Ok(output) = Command::new("chromium")
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
            .arg(format!("--window-size={window}"))
            .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
            .arg(format!("file://{}", measured.display()))
            .output()
        else {
            eprintln!("skipped: no chromium to open the page in");
            return;
        };
        let drawn = String::from_utf8_lossy(&output.stdout);
        // The library's own text has none, so each is a plot that its script has drawn.
        let count = drawn.matches("<svg ").count();
        assert!(count >= plots, "{window}: {count} of {plots} plots, {}", output.status);
        let over = drawn.rsplit_once("width ").and_then(|(_, rest)| rest.split_once(" over"));
        let over: i32 = over.and_then(|(over, _)| over.parse().ok()).expect("the page's width");
        assert!(over <= 0, "{window}: {over} pixels do not fit the window");
    }
}
