// SPDX-License-Identifier: Apache-2.0
//! Server parameters that drivers ask the console about, although there is no PostgreSQL behind it.
//!
//! PgBouncer knows the first five. The others are ours: libpq asks `transaction_read_only` for
//! `target_session_attrs`, and several drivers set `extra_float_digits` and `application_name` blindly. None is
//! a key of pgbouncer.ini, so no setting is hidden.

/// A parameter the console pretends to have.
#[derive(Debug, PartialEq, Eq)]
pub struct SessionParameter {
    /// Name as the column of SHOW is called.
    pub name: &'static str,
    /// Value SHOW answers.
    pub value: &'static str,
}

/// SHOW answers the value, SET is accepted with the notice [`SET_IGNORED`].
pub const SESSION_PARAMETERS: &[SessionParameter] = &[
    SessionParameter { name: "client_encoding", value: "UTF-8" },
    SessionParameter { name: "default_transaction_isolation", value: "read committed" },
    SessionParameter { name: "standard_conforming_strings", value: "on" },
    SessionParameter { name: "datestyle", value: "ISO" },
    SessionParameter { name: "timezone", value: "GMT" },
    SessionParameter { name: "application_name", value: "" },
    SessionParameter { name: "extra_float_digits", value: "1" },
    SessionParameter { name: "transaction_read_only", value: "off" },
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
