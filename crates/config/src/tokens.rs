// SPDX-License-Identifier: Apache-2.0
//! The words of one line of an HBA or ident file.

/// A word or a comma.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Token {
    /// `,`
    Comma,
    /// A bare word, which may be a keyword.
    Word(String),
    /// A word in double quotes, never a keyword.
    Quoted(String),
}

/// Splits a line; `#` outside quotes starts a comment. `None`: a quote is not closed.
pub(crate) fn tokens(line: &str) -> Option<Vec<Token>> {
    let mut tokens = Vec::new();
    let mut rest = line;
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_ascii_whitespace() || c == '\x0b');
        let Some(first) = rest.chars().next() else { return Some(tokens) };
        match first {
            '#' => return Some(tokens),
            ',' => {
                tokens.push(Token::Comma);
                rest = &rest[1..];
            }
            '"' => {
                let mut word = String::new();
                rest = &rest[1..];
                loop {
                    let (part, after) = rest.split_once('"')?;
                    word.push_str(part);
                    rest = after;
                    match rest.strip_prefix('"') {
                        Some(after) => {
                            word.push('"');
                            rest = after;
                        }
                        None => break,
                    }
                }
                tokens.push(Token::Quoted(word));
            }
            _ => {
                let end = rest
                    .find(|c: char| matches!(c, ',' | '#' | '"' | '\x0b') || c.is_ascii_whitespace())
                    .unwrap_or(rest.len());
                tokens.push(Token::Word(rest[..end].to_owned()));
                rest = &rest[end..];
            }
        }
    }
}

/// Reads tokens from the front.
#[derive(Debug)]
pub(crate) struct Cursor {
    tokens: std::vec::IntoIter<Token>,
}

impl Cursor {
    pub(crate) fn new(tokens: Vec<Token>) -> Self {
        Self { tokens: tokens.into_iter() }
    }

    pub(crate) fn next(&mut self) -> Option<Token> {
        self.tokens.next()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.as_slice().is_empty()
    }

    pub(crate) fn eat_comma(&mut self) -> bool {
        let comma = self.tokens.as_slice().first() == Some(&Token::Comma);
        if comma {
            self.tokens.next();
        }
        comma
    }
}

/// A token as an error shows it.
pub(crate) fn shown(token: Option<Token>) -> String {
    match token {
        None => "end of line".into(),
        Some(Token::Comma) => "\",\"".into(),
        Some(Token::Word(word) | Token::Quoted(word)) => format!("{word:?}"),
    }
}
