// SPDX-License-Identifier: Apache-2.0
//! The answer of PgBouncer's `auth_query`: one row of user name and stored secret.

use thiserror::Error;

use crate::client_auth::Credential;
use crate::secret::Secret;

/// A user that `auth_query` found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthQueryUser {
    /// The name in the row. PgBouncer goes on with this one, which a query may write differently.
    pub user: Vec<u8>,
    /// What is known about the password.
    pub credential: Credential,
}

/// A row that `auth_query` must not return. The login fails; the message belongs into the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AuthQueryError {
    /// PgBouncer wants exactly user name and password.
    #[error("expected 2 columns from auth_query, not {0}; select user name and password")]
    Columns(usize),
    /// The first column is NULL or empty.
    #[error("auth_query returned no user name in its first column")]
    NoUserName,
}

/// Reads the columns of the row that `auth_query` returned. NULL or an empty text in the second column mean
/// a user without a password, whom no password lets in. (No row at all is [`Credential::UnknownUser`].)
pub fn auth_query_row(columns: &[Option<&[u8]>]) -> Result<AuthQueryUser, AuthQueryError> {
    let &[user, password] = columns else {
        return Err(AuthQueryError::Columns(columns.len()));
    };
    let user = user.filter(|name| !name.is_empty()).ok_or(AuthQueryError::NoUserName)?.to_vec();
    let credential = match password {
        None | Some(b"") => Credential::NoPassword,
        Some(text) => Credential::Secret(Secret::parse(text)),
    };
    Ok(AuthQueryUser { user, credential })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_rows() {
        let user = auth_query_row(&[Some(b"joe"), Some(b"pw")]).unwrap();
        assert_eq!(user.user, b"joe");
        assert_eq!(user.credential, Credential::Secret(Secret::parse("pw")));
        assert_eq!(auth_query_row(&[Some(b"joe"), None]).unwrap().credential, Credential::NoPassword);
        assert_eq!(auth_query_row(&[Some(b"joe"), Some(b"")]).unwrap().credential, Credential::NoPassword);
        assert_eq!(auth_query_row(&[None, Some(b"x")]), Err(AuthQueryError::NoUserName));
        assert_eq!(auth_query_row(&[Some(b"joe")]), Err(AuthQueryError::Columns(1)));
        assert_eq!(auth_query_row(&[]), Err(AuthQueryError::Columns(0)));
    }
}
