// SPDX-License-Identifier: Apache-2.0
//! What mirrors answered otherwise than the primary, as a summary and as a page: what failed there that worked here, what else differs,
//! what got slower; and first of all what was not compared.

use std::cmp::Reverse;
use std::fmt::Write as _;

use underpass_charts::escape;
use underpass_mirror::{Account, Difference, Row, Snapshot};

use crate::text::{duration, shortened};

/// Longest part of a statement that the summary shows, in characters.
const SUMMARY_STATEMENT: usize = 100;

/// Which statements a table shows.
struct Part {
    title: &'static str,
    what: &'static str,
    counts: fn(Difference) -> bool,
}

/// A follow-up of an earlier error is in the second: its cause is in the first.
const PARTS: [Part; 2] = [
    Part {
        title: "Failed there, worked here",
        what: "An error of the mirror where the primary had none.",
        counts: |difference| matches!(difference, Difference::ErrorThere),
    },
    Part {
        title: "Answered otherwise",
        what: "Other errors, tags, numbers of rows, or rows; and what follows from an error before it in the transaction (cascade).",
        counts: |difference| !matches!(difference, Difference::ErrorThere),
    },
];

impl Part {
    /// How many results of a statement belong here, and as what.
    fn of(&self, row: &Row) -> (u64, String) {
        let own = row.differences.iter().filter(|(name, _)| {
            let difference = Difference::ALL.into_iter().find(|difference| difference.name() == name);
            // What a later version tells is not left out.
            difference.map_or(!(self.counts)(Difference::ErrorThere), self.counts)
        });
        let (mut count, mut names) = (0, Vec::new());
        for (name, times) in own {
            count += times;
            names.push(format!("{name} {times}"));
        }
        (count, names.join(", "))
    }

    /// The statements that belong here, the most frequent first.
    fn select<'a>(&self, snapshot: &'a Snapshot) -> Vec<(&'a Row, u64, String)> {
        let all = snapshot.statements.iter().map(|row| (row, self.of(row)));
        let mut own: Vec<_> = all
            .filter(|(_, (count, _))| *count > 0)
            .map(|(row, (count, names))| (row, count, names))
            .collect();
        own.sort_by_key(|(_, count, _)| Reverse(*count));
        own
    }
}

/// Statements that took twice as long there and a millisecond longer at least once, those first that lost most time in all.
fn slower(snapshot: &Snapshot) -> Vec<&Row> {
    let mut rows: Vec<_> = snapshot.statements.iter().filter(|row| row.slower > 0).collect();
    rows.sort_by_key(|row| Reverse(more_us(row)));
    rows
}

/// The time that all executions took longer there; below zero if it is less on the whole.
fn more_us(row: &Row) -> i128 {
    (i128::from(row.mean_there_us) - i128::from(row.mean_here_us)) * i128::from(row.timed)
}

fn time(us: u64) -> String {
    duration(us.saturating_mul(1000))
}

/// What was not compared, a sentence each.
fn caveats(snapshot: &Snapshot) -> Vec<String> {
    let mut all = Vec::new();
    for account in &snapshot.mirrors {
        let name = name(account);
        let mut say = |what: String| all.push(format!("{name}: {what}"));
        if account.state != "on" {
            let reason = account.reason.as_deref().map_or(String::new(), |reason| format!(" ({reason})"));
            say(format!("it is {}{reason}: nothing has been compared since.", account.state));
        }
        let dropped = account.all_dropped();
        if dropped > 0 {
            let reasons: Vec<_> =
                account.dropped.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
            say(format!(
                "{dropped} of {} transactions did not get there: {}. What differs later may follow from that.",
                account.transactions,
                reasons.join(", ")
            ));
        }
        if account.queued > 0 {
            say(format!("{} transactions still wait.", account.queued));
        }
        if account.not_compared > 0 {
            say(format!(
                "{} transactions were executed and not compared, for want of time.",
                account.not_compared
            ));
        }
        if account.filtered > 0 {
            say(format!("{} transactions that write were not sent (send = read_only).", account.filtered));
        }
        match &*account.compare_rows {
            "off" => {
                say("rows were counted, their contents were not compared (compare_rows = off).".to_owned())
            }
            "ordered" => {
                say("rows of statements without ORDER BY may come in another order: expected.".to_owned())
            }
            _ => {}
        }
        if account.mode == "async" {
            say("transactions of different clients may have passed each other (mode = async).".to_owned());
        }
    }
    all
}

fn name(account: &Account) -> String {
    format!("{} of {}", account.mirror, account.database)
}

/// The summary, with `top` statements of each kind.
pub fn text(snapshot: &Snapshot, top: usize) -> String {
    let mut out = String::new();
    for account in &snapshot.mirrors {
        let _ = writeln!(
            out,
            "{}: {}, {}; {} transactions: {} executed, {} waiting, {} dropped; {} compared",
            name(account),
            account.mode,
            account.state,
            account.transactions,
            account.executed,
            account.queued,
            account.all_dropped(),
            account.compared,
        );
    }
    if snapshot.mirrors.is_empty() {
        out.push_str("no mirror has had anything to do\n");
    }
    for caveat in caveats(snapshot) {
        let _ = writeln!(out, "  {caveat}");
    }
    for part in &PARTS {
        let rows = part.select(snapshot);
        let _ = writeln!(out, "\n{}: {} statements", part.title, rows.len());
        for (row, _, names) in rows.iter().take(top) {
            let _ =
                writeln!(out, "  {names} of {}: {}", row.compared, shortened(&row.query, SUMMARY_STATEMENT));
        }
    }
    let rows = slower(snapshot);
    let _ = writeln!(out, "\nSlower there: {} statements", rows.len());
    for row in rows.iter().take(top) {
        let _ = writeln!(
            out,
            "  {:.1} x, mean {} here, {} there, {} of {} slower: {}",
            row.ratio(),
            time(row.mean_here_us),
            time(row.mean_there_us),
            row.slower,
            row.timed,
            shortened(&row.query, SUMMARY_STATEMENT)
        );
    }
    out
}

/// The page, with `top` statements in each of its tables. One HTML file that needs no network.
pub fn page(snapshot: &Snapshot, top: usize) -> String {
    let mut body = accounts(snapshot);
    body.push_str(&honesty(snapshot));
    for part in &PARTS {
        body.push_str(&differing(part, snapshot, top));
    }
    body.push_str(&slower_there(snapshot, top));
    body.push_str(&expected(snapshot, top));
    underpass_charts::page("What differs on mirrors", &body)
}

/// A section with a table of at most `top` rows; `head` names its columns, the texts among them behind a `*`.
fn table(title: &str, what: &str, head: &[&str], top: usize, rows: Vec<Vec<String>>) -> String {
    let mut text = format!("<section><h2>{}</h2><p>{}</p>", escape(title), escape(what));
    if rows.is_empty() {
        text.push_str("<p>None.</p></section>\n");
        return text;
    }
    let class = |name: &str| if name.starts_with('*') { " class=\"text\"" } else { "" };
    text.push_str("<div class=\"scroll\"><table><tr>");
    for name in head {
        let _ = write!(text, "<th{}>{}</th>", class(name), escape(name.trim_start_matches('*')));
    }
    text.push_str("</tr>");
    for row in rows.iter().take(top) {
        text.push_str("<tr>");
        for (name, cell) in head.iter().zip(row) {
            let _ = write!(text, "<td{}>{}</td>", class(name), escape(cell));
        }
        text.push_str("</tr>");
    }
    text.push_str("</table></div>");
    if rows.len() > top {
        let _ = write!(text, "<p>{} more are not shown.</p>", rows.len() - top);
    }
    text.push_str("</section>\n");
    text
}

fn accounts(snapshot: &Snapshot) -> String {
    let rows = snapshot.mirrors.iter().map(|account| {
        let counts =
            [account.transactions, account.executed, account.queued, account.all_dropped(), account.compared];
        let texts = [&account.mirror, &account.database, &account.mode, &account.state].map(Clone::clone);
        texts.into_iter().chain(counts.map(|count| count.to_string())).collect()
    });
    table(
        "Mirrors",
        "Transactions = executed + waiting + dropped.",
        &[
            "mirror",
            "database",
            "mode",
            "state",
            "transactions",
            "executed",
            "waiting",
            "dropped",
            "answers compared",
        ],
        usize::MAX,
        rows.collect(),
    )
}

fn honesty(snapshot: &Snapshot) -> String {
    let caveats = caveats(snapshot);
    let class = if caveats.is_empty() { "honesty whole" } else { "honesty" };
    let mut text = format!("<section class=\"{class}\"><h2>What was not compared</h2><ul>");
    for caveat in &caveats {
        let _ = write!(text, "<li>{}</li>", escape(caveat));
    }
    text.push_str(
        "<li>Times are of statements that were alone in their batch, on either server without waiting for a connection.</li>\
         <li>Whether a result may vary is judged by the names in its text: what functions and views do inside is not seen.</li>",
    );
    if !snapshot.mirrors.iter().any(|account| account.show_literals) {
        text.push_str("<li>Literals and messages of errors are hidden (show_literals = 0).</li>");
    }
    text.push_str("</ul></section>\n");
    text
}

fn statement(row: &Row) -> [String; 2] {
    [format!("{} of {}", row.mirror, row.database), shortened(&row.query, 2_000)]
}

fn differing(part: &Part, snapshot: &Snapshot, top: usize) -> String {
    let rows = part.select(snapshot).into_iter().map(|(row, count, names)| {
        let [mirror, query] = statement(row);
        let example = row.example.as_ref().map_or(String::new(), |example| {
            format!("{} — here: {}; there: {}", example.statement, example.here, example.there)
        });
        vec![mirror, count.to_string(), row.compared.to_string(), names, query, example]
    });
    table(
        part.title,
        part.what,
        &["mirror", "differing", "compared", "as", "*statement", "*example"],
        top,
        rows.collect(),
    )
}

fn slower_there(snapshot: &Snapshot, top: usize) -> String {
    let rows = slower(snapshot).into_iter().map(|row| {
        let [mirror, query] = statement(row);
        let more = u64::try_from(more_us(row)).map_or_else(|_| "none".to_owned(), time);
        vec![
            mirror,
            format!("{:.2}", row.ratio()),
            time(row.mean_here_us),
            time(row.mean_there_us),
            time(row.max_here_us),
            time(row.max_there_us),
            format!("{} of {}", row.slower, row.timed),
            more,
            query,
        ]
    });
    table(
        "Slower there",
        "Statements that took twice as long and a millisecond longer at least once; those first that lost most time in all.",
        &[
            "mirror",
            "ratio of means",
            "mean here",
            "mean there",
            "max here",
            "max there",
            "slower",
            "lost in all",
            "*statement",
        ],
        top,
        rows.collect(),
    )
}

fn expected(snapshot: &Snapshot, top: usize) -> String {
    let mut rows: Vec<_> = snapshot.statements.iter().filter(|row| row.expected > 0).collect();
    rows.sort_by_key(|row| Reverse(row.expected));
    let rows = rows.into_iter().map(|row| {
        let [mirror, query] = statement(row);
        vec![mirror, row.expected.to_string(), row.compared.to_string(), row.varies.join(", "), query]
    });
    table(
        "Differs by its nature",
        "Not counted above.",
        &["mirror", "differing", "compared", "because of", "*statement"],
        top,
        rows.collect(),
    )
}

#[cfg(test)]
mod tests {
    use underpass_mirror::Example;

    use super::*;

    fn row(query: &str) -> Row {
        Row {
            mirror: "next".into(),
            database: "shop".into(),
            fingerprint: "00".into(),
            query: query.into(),
            varies: Vec::new(),
            compared: 100,
            differences: Vec::new(),
            expected: 0,
            timed: 100,
            slower: 0,
            mean_here_us: 200,
            mean_there_us: 210,
            max_here_us: 900,
            max_there_us: 900,
            example: None,
        }
    }

    fn snapshot() -> Snapshot {
        let example = |there: &str| {
            Some(Example {
                statement: "x < $1".into(),
                here: "INSERT 0 1, 0 rows".into(),
                there: there.into(),
            })
        };
        Snapshot {
            mirrors: vec![Account {
                mirror: "next".into(),
                database: "shop".into(),
                mode: "async".into(),
                state: "on".into(),
                reason: None,
                compare_rows: "off".into(),
                show_literals: false,
                transactions: 1000,
                executed: 990,
                queued: 0,
                dropped: vec![("queue_full".into(), 10)],
                filtered: 0,
                compared: 2000,
                not_compared: 3,
            }],
            statements: vec![
                Row {
                    differences: vec![("error_there".into(), 7), ("cascade".into(), 2)],
                    example: example("ERROR 42P01"),
                    ..row("insert into gone values ($1)")
                },
                Row { differences: vec![("rows".into(), 1)], ..row("select v from t where a < $1") },
                Row { slower: 90, mean_there_us: 20_000, ..row("select scanned") },
                Row { slower: 1, mean_there_us: 300, ..row("select once") },
                Row { expected: 5, varies: vec!["clock".into()], ..row("select now()") },
                row("select equal"),
            ],
        }
    }

    /// What stands between a heading and the next.
    fn section<'a>(page: &'a str, title: &str) -> &'a str {
        let rest =
            page.split(&format!("<h2>{title}</h2>")).nth(1).unwrap_or_else(|| panic!("no section {title}"));
        rest.split("<h2>").next().unwrap_or_default()
    }

    #[test]
    fn the_page_tells_each_difference_once_and_what_it_does_not_know() {
        let page = page(&snapshot(), 20);
        let failed = section(&page, "Failed there, worked here");
        assert!(failed.contains("insert into gone") && failed.contains("error_there 7"), "{failed}");
        assert!(
            failed.contains("x &lt; $1") && failed.contains("ERROR 42P01"),
            "an example, escaped: {failed}"
        );
        assert!(!failed.contains("a &lt; $1") && !failed.contains("cascade"), "{failed}");
        let otherwise = section(&page, "Answered otherwise");
        assert!(otherwise.contains("rows 1") && otherwise.contains("cascade 2"), "{otherwise}");
        let slower = section(&page, "Slower there");
        assert!(slower.contains("100.00") && slower.contains("90 of 100"), "{slower}");
        assert!(slower.find("select scanned") < slower.find("select once"), "{slower}");
        assert!(!slower.contains("select equal"));
        assert!(section(&page, "Differs by its nature").contains("clock"));
        let honesty = section(&page, "What was not compared");
        for part in [
            "10 of 1000 transactions",
            "10 queue_full",
            "3 transactions were executed",
            "compare_rows = off",
            "hidden",
        ] {
            assert!(honesty.contains(part), "{part}: {honesty}");
        }
    }

    #[test]
    fn the_summary_names_the_worst() {
        let text = text(&snapshot(), 1);
        assert!(text.contains("990 executed, 0 waiting, 10 dropped"), "{text}");
        assert!(text.contains("error_there 7 of 100: insert into gone"), "{text}");
        assert!(text.contains("100.0 x") && !text.contains("select once"), "{text}");
        assert!(super::text(&Snapshot::default(), 5).contains("no mirror"));
    }

    #[test]
    fn what_was_written_is_read() {
        let snapshot = snapshot();
        let json = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&json).unwrap(), snapshot);
    }
}
