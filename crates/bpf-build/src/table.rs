// SPDX-License-Identifier: Apache-2.0
//! Names for counters and reasons: read from the X-macro of a C header, so that C and Rust share one table.

use std::fmt::Write as _;
use std::path::Path;

use crate::Error;

/// One line of a table: `X(NAME, "name", "meaning")`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The enumerator without its prefix, for example `NAMED_STATEMENT`.
    pub ident: String,
    /// The name that people see, for example `named_statement`.
    pub name: String,
    /// One sentence for the documentation.
    pub meaning: String,
}

/// Reads the table that the macro `name` of the header `path` holds, in order.
///
/// # Errors
/// [`Error::Io`] when the header cannot be read, [`Error::Table`] when it has no such table.
pub fn read_table(path: &Path, name: &str) -> Result<Vec<Entry>, Error> {
    let text =
        std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
    let entries = parse_table(&text, name);
    if entries.is_empty() {
        return Err(Error::Table { path: path.to_path_buf(), name: name.to_owned() });
    }
    Ok(entries)
}

fn parse_table(text: &str, name: &str) -> Vec<Entry> {
    let head = format!("#define {name}(X)");
    let mut entries = Vec::new();
    for line in text.lines().skip_while(|line| !line.starts_with(&head)).skip(1) {
        let Some(inner) = line.trim().strip_prefix("X(") else { break };
        let mut parts = inner.splitn(2, ',');
        let ident = parts.next().unwrap_or("").trim().to_owned();
        let strings: Vec<&str> = parts.next().unwrap_or("").split('"').collect();
        // Odd positions lie between quotes: name, then meaning.
        let (Some(name), Some(meaning)) = (strings.get(1), strings.get(3)) else { break };
        entries.push(Entry { ident, name: (*name).to_owned(), meaning: (*meaning).to_owned() });
        if !line.ends_with('\\') {
            break;
        }
    }
    entries
}

/// Writes the table as a Rust enum `name` with `ALL`, `name()` and `meaning()`; `doc` documents the enum.
pub fn write_table(entries: &[Entry], name: &str, doc: &str) -> String {
    let variant = |ident: &str| -> String {
        ident
            .split('_')
            .map(|word| {
                let lower = word.to_lowercase();
                let mut chars = lower.chars();
                chars.next().map_or(String::new(), |c| c.to_uppercase().collect::<String>() + chars.as_str())
            })
            .collect()
    };
    let mut out = format!(
        "/// {doc}\n#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]\n#[repr(u32)]\npub enum {name} {{\n"
    );
    for (index, entry) in entries.iter().enumerate() {
        let _ = writeln!(out, "    /// {}\n    {} = {index},", entry.meaning, variant(&entry.ident));
    }
    let _ = writeln!(
        out,
        "}}\nimpl {name} {{\n    /// Every value, in the order of its number.\n    pub const ALL: [{name}; {}] = [",
        entries.len()
    );
    for entry in entries {
        let _ = writeln!(out, "        {name}::{},", variant(&entry.ident));
    }
    out.push_str("    ];\n    /// The name in SHOW KERNEL, metrics and logs.\n    pub const fn name(self) -> &'static str {\n        match self {\n");
    for entry in entries {
        let _ = writeln!(out, "            {name}::{} => {:?},", variant(&entry.ident), entry.name);
    }
    out.push_str("        }\n    }\n    /// What it means, one sentence.\n    pub const fn meaning(self) -> &'static str {\n        match self {\n");
    for entry in entries {
        let _ = writeln!(out, "            {name}::{} => {:?},", variant(&entry.ident), entry.meaning);
    }
    out.push_str("        }\n    }\n}\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_in_order_and_ends_with_its_macro() {
        let text = "#define OTHER(X) \\\n\tX(NO, \"no\", \"n\")\n#define REASONS(X) \\\n\tX(A_B, \"a_b\", \"First.\") \\\n\tX(C, \"c\", \"Second, with comma.\")\nX(D, \"d\", \"not part\")\n";
        let entries = parse_table(text, "REASONS");
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[0].ident, "A_B");
        assert_eq!(entries[1].meaning, "Second, with comma.");
        let rust = write_table(&entries, "Reason", "Why.");
        assert!(rust.contains("AB = 0,") && rust.contains("Reason::C => \"c\""));
    }
}
