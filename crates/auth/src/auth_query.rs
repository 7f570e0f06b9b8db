// SPDX-License-Identifier: Apache-2.0
//! The answer of PgBouncer's `auth_query`: one row of user name and stored secret.

use thiserror::Error;

use crate::client_auth::Credential;
use crate::secret::Secret;

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
/// a user without a password, whom no password lets in. (No row at all is [`Credential::UnknownUser`].) The name must be there and is not
/// used: the client stays who it said it is.
pub fn auth_query_row(columns: &[Option<&[u8]>]) -> Result<Credential, AuthQueryError> {
    let &[user, password] = columns else {
        return Err(AuthQueryError::Columns(columns.len()));
    };
    user.filter(|name| !name.is_empty()).ok_or(AuthQueryError::NoUserName)?;
    Ok(match password {
        None | Some(b"") => Credential::NoPassword,
        Some(text) => Credential::Secret(Secret::parse(text)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_rows() {
        let secret = Credential::Secret(Secret::parse("pw"));
        assert_eq!(auth_query_row(&[Some(b"joe"), Some(b"pw")]), Ok(secret));
        assert_eq!(auth_query_row(&[Some(b"joe"), None]), Ok(Credential::NoPassword));
        assert_eq!(auth_query_row(&[Some(b"joe"), Some(b"")]), Ok(Credential::NoPassword));
        assert_eq!(auth_query_row(&[None, Some(b"x")]), Err(AuthQueryError::NoUserName));
        assert_eq!(auth_query_row(&[Some(b"joe")]), Err(AuthQueryError::Columns(1)));
        assert_eq!(auth_query_row(&[]), Err(AuthQueryError::Columns(0)));
    }
}
