// SPDX-License-Identifier: Apache-2.0
//! What the pages of `make bench` and of `underpass report` share: the page itself with ECharts in it, colours, escaping.
#![forbid(unsafe_code)]

use charming::Chart;

/// Apache ECharts, from the `charming` crate's own sources; see build.rs.
pub const ECHARTS: &str = include_str!(concat!(env!("OUT_DIR"), "/echarts.min.js"));

const PAGE: &str = include_str!("page.html");

/// A part of a page.
#[derive(Clone, Debug)]
pub struct Section {
    /// Its heading, plain text.
    pub title: String,
    /// Its contents, HTML.
    pub html: String,
}

/// One HTML file that needs no network: title as plain text, body as HTML.
#[must_use]
pub fn page(title: &str, body: &str) -> String {
    let title = escape(title);
    let mut page = String::with_capacity(PAGE.len() + ECHARTS.len() + body.len());
    // A body may contain a place's name: each place is looked for in the template only.
    for (at, part) in PAGE.split("{{").enumerate() {
        let (place, rest) = if at == 0 { ("", part) } else { part.split_once("}}").unwrap_or(("", part)) };
        match place {
            "title" => page.push_str(&title),
            "body" => page.push_str(body),
            "echarts" => page.push_str(ECHARTS),
            _ => {}
        }
        page.push_str(rest);
    }
    page
}

/// Okabe and Ito's colours, which colour-blind readers can tell apart.
pub const COLOURS: [&str; 8] =
    ["#7f7f7f", "#0072b2", "#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#f0e442"];

/// A text as it may stand in HTML, also in an attribute.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A plot of this height in CSS pixels: its caption, and its options for the page's script to draw.
///
/// # Errors
/// When the options are no JSON, which is a bug of the chart library.
pub fn figure(caption: &str, height: usize, options: &Chart) -> Result<String, serde_json::Error> {
    // Neither `</script>` nor `<!--` can stand in it then.
    let options = serde_json::to_string(options)?.replace('<', "\\u003c");
    Ok(format!(
        "<figure><figcaption>{}</figcaption><div class=\"chart\" style=\"height:{height}px\"></div>\
         <script type=\"application/json\">{options}</script></figure>",
        escape(caption)
    ))
}

/// Four significant digits: more is noise, and it makes the page larger.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_four_digits() {
        assert_eq!(rounded(123_456.0), 123_500.0);
        assert_eq!(rounded(0.012_345_6), 0.012_35);
        assert_eq!(rounded(f64::NAN), 0.0);
    }

    #[test]
    fn a_page_is_filled_once_and_loads_nothing() {
        let page = page("a <b>", "<p>{{title}}</p>");
        assert!(page.contains("<h1>a &lt;b&gt;</h1>") && page.contains("<p>{{title}}</p>"));
        let own = page.replace(ECHARTS, "");
        assert_eq!(own.matches("{{").count(), 1, "a place was left");
        assert!(page.len() > ECHARTS.len() && !own.contains("src=") && !own.contains("https://"));
    }

    #[test]
    fn nothing_in_a_figure_ends_its_script() {
        let chart = Chart::new().title(charming::component::Title::new().text("</script><b>"));
        let figure = figure("a <b> & \"c\"", 10, &chart).unwrap();
        assert!(figure.contains("a &lt;b&gt; &amp; &quot;c&quot;"));
        assert_eq!(figure.matches("</script>").count(), 1, "{figure}");
    }
}
