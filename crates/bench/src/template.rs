// SPDX-License-Identifier: Apache-2.0
//! Configuration templates with `{{name}}` places.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail};

/// The text of a built-in template by its name in bench/templates, or of a file when the name is a path.
///
/// # Errors
/// When there is none.
pub fn of(name: &str) -> Result<String> {
    let text = match name {
        "pgbouncer.ini" => include_str!("../../../bench/templates/pgbouncer.ini"),
        "underpass.ini" => include_str!("../../../bench/templates/underpass.ini"),
        "pgpool.conf" => include_str!("../../../bench/templates/pgpool.conf"),
        "odyssey.conf" => include_str!("../../../bench/templates/odyssey.conf"),
        "pgcat.toml" => include_str!("../../../bench/templates/pgcat.toml"),
        "pgdog.toml" => include_str!("../../../bench/templates/pgdog.toml"),
        "pgdog-users.toml" => include_str!("../../../bench/templates/pgdog-users.toml"),
        path => return fs::read_to_string(path).with_context(|| format!("no template {path}")),
    };
    Ok(text.to_owned())
}

/// Fills the places of a template.
///
/// # Errors
/// When a place has no value or is not closed.
pub fn fill(text: String, values: &BTreeMap<&'static str, String>) -> Result<String> {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(start) = rest.find("{{") {
        filled.push_str(&rest[..start]);
        let Some(end) = rest[start..].find("}}") else { bail!("a place is not closed") };
        let name = &rest[start + 2..start + end];
        filled.push_str(values.get(name).with_context(|| format!("no value for {{{{{name}}}}}"))?);
        rest = &rest[start + end + 2..];
    }
    filled.push_str(rest);
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_filled_and_unknown_ones_refused() {
        let values = BTreeMap::from([("port", "6432".to_owned())]);
        assert_eq!(fill("a {{port}} b {{port}}".into(), &values).unwrap(), "a 6432 b 6432");
        assert!(fill("{{colour}}".into(), &values).unwrap_err().to_string().contains("colour"));
        assert!(fill("{{port".into(), &values).is_err());
    }
}
