// SPDX-License-Identifier: Apache-2.0
//! rustls configurations from PgBouncer's TLS keys, and what authentication wants to know of certificates.
//!
//! [`ClientSide`] is TLS towards clients (`client_tls_*`), [`ServerSide`] TLS towards PostgreSQL
//! (`server_tls_*`). Both read their files once, when built; a RELOAD builds new ones and swaps the `Arc`, so
//! open connections keep what they began with. No socket is touched here.
//!
//! rustls knows TLS 1.2 and 1.3 with forward-secret AEAD suites only. What an OpenSSL-style value asks beyond
//! that is a warning while something usable is left, and an error when nothing is.

#![forbid(unsafe_code)]

mod certificate;
mod client_side;
mod error;
mod files;
mod options;
mod server_side;
mod suites;
mod verifier;

pub use certificate::{common_name, server_end_point_hash};
pub use client_side::ClientSide;
pub use error::TlsError;
pub use options::{SslMode, TlsClientOptions, TlsServerOptions};
pub use server_side::ServerSide;
pub use suites::describe;

/// The ALPN protocol of PostgreSQL (manual, "Direct SSL"): required for direct TLS, offered always.
pub const ALPN: &[u8] = b"postgresql";
