// SPDX-License-Identifier: Apache-2.0
//! Server parameters that drivers ask the console about, although there is no PostgreSQL behind it.
//!
//! PgBouncer knows the first five. The others are ours: libpq asks `transaction_read_only` for
//! `target_session_attrs`, and several drivers set `extra_float_digits` and `application_name` blindly. None is
//! a key of pgbouncer.ini, so no setting is hidden.

use crate::table::{Cells, Column, ColumnType, Table, TableRow};

/// A parameter the console pretends to have.
#[derive(Debug, PartialEq, Eq)]
pub struct SessionParameter {
    /// Name as the column of SHOW is called.
    pub name: &'static str,
    /// Value SHOW answers.
    pub value: &'static str,
    columns: [Column; 1],
}

impl SessionParameter {
    const fn new(name: &'static str, value: &'static str) -> Self {
        let help = "Value of the parameter.";
        Self { name, value, columns: [Column { name, column_type: ColumnType::Text, help }] }
    }

    /// The answer to SHOW: one row with one column that has the parameter's name.
    #[must_use]
    pub fn table(&'static self) -> Table {
        let mut table = Table::new(&self.columns);
        table.push(self);
        table
    }
}

impl TableRow for SessionParameter {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.value);
    }
}

/// SHOW answers the value, SET is accepted with the notice [`SET_IGNORED`].
pub static SESSION_PARAMETERS: [SessionParameter; 8] = [
    SessionParameter::new("client_encoding", "UTF-8"),
    SessionParameter::new("default_transaction_isolation", "read committed"),
    SessionParameter::new("standard_conforming_strings", "on"),
    SessionParameter::new("datestyle", "ISO"),
    SessionParameter::new("timezone", "GMT"),
    SessionParameter::new("application_name", ""),
    SessionParameter::new("extra_float_digits", "1"),
    SessionParameter::new("transaction_read_only", "off"),
];

/// Notice that goes with a SET of a session parameter.
pub const SET_IGNORED: &str = "SET ignored";

/// Notice that goes with a SET of a `*_tls_*` key whose files or values could not be used.
pub const SET_TLS_NOT_APPLIED: &str = "TLS settings could not be applied, still using old configuration";

/// ParameterStatus messages of a console login, apart from `server_version`, which is `<version>/bouncer`.
pub const WELCOME_PARAMETERS: &[(&str, &str)] = &[
    ("client_encoding", "UTF8"),
    ("server_encoding", "UTF8"),
    ("DateStyle", "ISO"),
    ("TimeZone", "GMT"),
    ("standard_conforming_strings", "on"),
    ("is_superuser", "on"),
];

/// Finds a session parameter, whatever the case of `name`.
#[must_use]
pub fn session_parameter(name: &str) -> Option<&'static SessionParameter> {
    SESSION_PARAMETERS.iter().find(|parameter| parameter.name.eq_ignore_ascii_case(name))
}
