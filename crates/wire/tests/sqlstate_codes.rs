// SPDX-License-Identifier: Apache-2.0
//! The generated SQLSTATE constants are those of the installed PostgreSQL 15.

#[path = "../examples/gen_sqlstate.rs"]
mod gen_sqlstate;

/// Where Debian's postgresql-15 puts it.
const ERRCODES: &str = "/usr/share/postgresql/15/errcodes.txt";

#[test]
fn codes_are_fresh() {
    let Ok(errcodes) = std::fs::read_to_string(ERRCODES) else {
        eprintln!("SKIP: {ERRCODES} is not installed");
        return;
    };
    let checked_in = include_str!("../src/sqlstate/codes.rs");
    assert_eq!(gen_sqlstate::generate(&errcodes), checked_in, "run the example gen_sqlstate");
}

#[test]
fn generator_reads_the_format() {
    let text = "# c\n\nSection: Class 00 - Fine\n\n00000    S    ERRCODE_OK    ok\n0A000    E    ERRCODE_NO\n00000    S    ERRCODE_TOO\n";
    let made = gen_sqlstate::generate(text);
    assert!(made.contains("    // Class 00 - Fine\n    OK = b\"00000\", \"ok\";\n"));
    assert!(made.contains("    NO = b\"0A000\", \"no\";\n"));
    assert!(made.ends_with("aliases! {\n    TOO = OK;\n}\n"));
}
