// SPDX-License-Identifier: Apache-2.0
//! A small PostgreSQL: messages in, messages out, by the rules of the manual's chapter 55, with a language of a dozen statements.
//! Errors carry their SQLSTATE, and the name of the statement where PostgreSQL names it.

use std::collections::HashMap;

/// Appends a message of `tag` whose body is `parts` joined.
pub fn message(out: &mut Vec<u8>, tag: u8, parts: &[&[u8]]) {
    let length = 4 + parts.iter().map(|part| part.len()).sum::<usize>();
    out.push(tag);
    out.extend_from_slice(&(length as u32).to_be_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

/// Why a statement did not do.
type Failed = &'static [u8; 5];
const SYNTAX: Failed = b"42601";
const DUPLICATE: Failed = b"42P05";
const NO_STATEMENT: Failed = b"26000";
const NO_PORTAL: Failed = b"34000";
const IN_FAILED: Failed = b"25P02";
const DIVISION: Failed = b"22012";
const VIOLATION: Failed = b"08P01";
const COPY_FAILED: Failed = b"57014";
const COPY_REFUSED: Failed = b"42809";

/// What follows a statement.
enum Outcome {
    Done,
    CopyIn,
}

/// State of one server process.
#[derive(Debug, Default)]
pub struct Backend {
    /// b'I', b'T' or b'E'; 0 stands for b'I'.
    status: u8,
    skipping: bool,
    /// Extended messages since the last Sync.
    implicit: bool,
    statements: HashMap<Vec<u8>, String>,
    unnamed: Option<String>,
    portal: Option<String>,
    /// In COPY FROM STDIN, and whether it began by Execute.
    copying: Option<bool>,
    input: Vec<u8>,
    /// What the next error says, if it names a statement.
    complaint: Option<String>,
    /// The pooler's one liberty: a Parse or Close of the unnamed statement that is discarded after an error leaves none, where PostgreSQL would
    /// keep the one before.
    pub forgets_skipped_unnamed: bool,
    /// Something else than COPY data came during COPY: no client does that, and what follows cannot be told from one side.
    pub violated: bool,
}

impl Backend {
    /// Between transactions, with nothing begun.
    pub fn is_at_rest(&self) -> bool {
        self.is_settled() && self.transaction() == b'I'
    }

    /// Waits for a request; a transaction may be open.
    pub fn is_settled(&self) -> bool {
        !self.skipping && !self.implicit && self.copying.is_none() && self.input.is_empty()
    }

    fn transaction(&self) -> u8 {
        if self.status == 0 { b'I' } else { self.status }
    }

    /// Reads `bytes`; a cut message waits for its rest.
    pub fn read(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        self.input.extend_from_slice(bytes);
        loop {
            let Some(header) = self.input.first_chunk::<5>() else { return };
            let total = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize + 1;
            if self.input.len() < total {
                return;
            }
            let rest = self.input.split_off(total);
            let one = std::mem::replace(&mut self.input, rest);
            self.handle(one[0], &one[5..], out);
        }
    }

    fn handle(&mut self, tag: u8, body: &[u8], out: &mut Vec<u8>) {
        if let Some(extended) = self.copying {
            return self.copy_message(tag, body, extended, out);
        }
        if self.skipping && tag != b'S' {
            let unnamed = tag == b'P' && body[0] == 0 || tag == b'C' && body == b"S\0";
            if unnamed && self.forgets_skipped_unnamed {
                self.unnamed = None;
            }
            return;
        }
        match tag {
            b'S' => {
                self.skipping = false;
                self.ready(out);
            }
            b'Q' => self.query(&text(body, 0), out),
            b'F' => {
                match self.transaction() {
                    b'E' => self.error(IN_FAILED, out),
                    _ => message(out, b'V', &[b"\0\0\0\x01x"]),
                }
                self.ready(out);
            }
            b'P' | b'B' | b'D' | b'E' | b'C' => {
                self.implicit = true;
                if let Err(failed) = self.extended(tag, body, out) {
                    self.error(failed, out);
                    self.skipping = true;
                }
            }
            // Flush, and COPY messages outside COPY.
            _ => {}
        }
    }

    fn copy_message(&mut self, tag: u8, body: &[u8], extended: bool, out: &mut Vec<u8>) {
        let failed = match tag {
            b'd' if body == b"bad" => Some(DIVISION),
            b'c' => {
                self.copying = None;
                message(out, b'C', &[b"COPY 1\0"]);
                if !extended {
                    self.ready(out);
                }
                return;
            }
            b'f' => Some(COPY_FAILED),
            // Ignored, so that they may be sent ahead.
            b'd' | b'S' | b'H' => None,
            _ => {
                self.violated = true;
                Some(VIOLATION)
            }
        };
        if let Some(failed) = failed {
            self.copying = None;
            self.error(failed, out);
            if extended {
                self.skipping = true;
            } else {
                self.ready(out);
            }
        }
    }

    fn error(&mut self, failed: Failed, out: &mut Vec<u8>) {
        self.portal = None;
        if self.transaction() == b'T' {
            self.status = b'E';
        }
        let text = self.complaint.take().map(|text| format!("M{text}\0")).unwrap_or_default();
        message(out, b'E', &[b"C", failed, b"\0", text.as_bytes(), b"\0"]);
    }

    fn ready(&mut self, out: &mut Vec<u8>) {
        self.implicit = false;
        if self.transaction() == b'I' {
            self.portal = None;
        }
        message(out, b'Z', &[&[self.transaction()]]);
    }

    fn query(&mut self, sql: &str, out: &mut Vec<u8>) {
        self.unnamed = None;
        let parts: Vec<&str> = sql.split(';').collect();
        if parts.contains(&"syntax") {
            self.error(SYNTAX, out);
            return self.ready(out);
        }
        if parts.iter().all(|part| part.is_empty()) {
            message(out, b'I', &[]);
            return self.ready(out);
        }
        for part in parts.into_iter().filter(|part| !part.is_empty()) {
            if part.starts_with("row") && self.transaction() != b'E' {
                message(out, b'T', &[b"\0\x01a column, in some bytes"]);
            }
            match self.execute(part, out) {
                Ok(Outcome::Done) => {}
                Ok(Outcome::CopyIn) => {
                    self.copying = Some(false);
                    return;
                }
                Err(failed) => {
                    self.error(failed, out);
                    break;
                }
            }
        }
        self.ready(out);
    }

    fn execute(&mut self, sql: &str, out: &mut Vec<u8>) -> Result<Outcome, Failed> {
        self.may_run(sql)?;
        let tag = match sql {
            "" => {
                message(out, b'I', &[]);
                return Ok(Outcome::Done);
            }
            "begin" => {
                self.status = b'T';
                "BEGIN"
            }
            "commit" | "rollback" => {
                let failed = self.transaction() == b'E';
                self.status = b'I';
                if sql == "commit" && !failed { "COMMIT" } else { "ROLLBACK" }
            }
            "fail" => return Err(DIVISION),
            "deallocate all" => {
                self.statements.clear();
                "DEALLOCATE ALL"
            }
            "set" => {
                message(out, b'S', &[b"application_name\0x\0"]);
                "SET"
            }
            "copy out" => {
                message(out, b'H', &[b"\0\0\0"]);
                message(out, b'd', &[b"data"]);
                message(out, b'c', &[]);
                "COPY 1"
            }
            "copy in" => {
                message(out, b'G', &[b"\0\0\0"]);
                return Ok(Outcome::CopyIn);
            }
            // A view, say: found between CopyInResponse and the first look at what comes behind it.
            "copy refused" => {
                message(out, b'G', &[b"\0\0\0"]);
                return Err(COPY_REFUSED);
            }
            row => {
                message(out, b'D', &[b"\0\x01", &(row.len() as u32).to_be_bytes(), row.as_bytes()]);
                "SELECT 1"
            }
        };
        message(out, b'C', &[tag.as_bytes(), b"\0"]);
        Ok(Outcome::Done)
    }

    /// In a failed transaction only its end may run; an empty statement does no harm.
    fn may_run(&self, sql: &str) -> Result<(), Failed> {
        match (self.transaction(), sql) {
            (b'E', "commit" | "rollback" | "") => Ok(()),
            (b'E', _) => Err(IN_FAILED),
            _ => Ok(()),
        }
    }

    fn statement(&mut self, name: &str) -> Result<String, Failed> {
        let found = match name {
            "" => self.unnamed.clone(),
            name => self.statements.get(name.as_bytes()).cloned(),
        };
        if found.is_none() && !name.is_empty() {
            self.complaint = Some(format!("prepared statement \"{name}\" does not exist"));
        }
        found.ok_or(NO_STATEMENT)
    }

    fn extended(&mut self, tag: u8, body: &[u8], out: &mut Vec<u8>) -> Result<(), Failed> {
        match tag {
            b'P' => {
                let (name, sql) = (text(body, 0), text(body, 1));
                if name.is_empty() {
                    self.unnamed = None;
                }
                if sql == "syntax" {
                    return Err(SYNTAX);
                }
                self.may_run(&sql)?;
                if name.is_empty() {
                    self.unnamed = Some(sql);
                } else if self.statements.contains_key(name.as_bytes()) {
                    self.complaint = Some(format!("prepared statement \"{name}\" already exists"));
                    return Err(DUPLICATE);
                } else {
                    self.statements.insert(name.into_bytes(), sql);
                }
                message(out, b'1', &[]);
            }
            b'B' => {
                let sql = self.statement(&text(body, 1))?;
                self.may_run(&sql)?;
                self.portal = Some(sql);
                message(out, b'2', &[]);
            }
            b'D' if body[0] == b'S' => {
                let sql = self.statement(&text(&body[1..], 0))?;
                if sql.starts_with("row") {
                    self.may_run(&sql)?;
                }
                message(out, b't', &[b"\0\0"]);
                describe(&sql, out);
            }
            b'D' => {
                let sql = self.portal.clone().ok_or(NO_PORTAL)?;
                if sql.starts_with("row") {
                    self.may_run(&sql)?;
                }
                describe(&sql, out);
            }
            b'C' => {
                match (body[0], text(&body[1..], 0)) {
                    (b'S', name) if name.is_empty() => self.unnamed = None,
                    (b'S', name) => drop(self.statements.remove(name.as_bytes())),
                    _ => self.portal = None,
                }
                message(out, b'3', &[]);
            }
            _ => {
                let sql = self.portal.clone().ok_or(NO_PORTAL)?;
                if let Outcome::CopyIn = self.execute(&sql, out)? {
                    self.copying = Some(true);
                }
                if matches!(sql.as_str(), "commit" | "rollback") {
                    self.portal = None;
                }
            }
        }
        Ok(())
    }
}

fn describe(sql: &str, out: &mut Vec<u8>) {
    if sql.starts_with("row") {
        message(out, b'T', &[b"\0\x01a column, in some bytes"]);
    } else {
        message(out, b'n', &[]);
    }
}

/// The string number `index` of a body.
fn text(body: &[u8], index: usize) -> String {
    String::from_utf8_lossy(body.split(|&byte| byte == 0).nth(index).unwrap_or_default()).into_owned()
}
