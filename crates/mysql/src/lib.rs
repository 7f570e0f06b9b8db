// SPDX-License-Identifier: Apache-2.0
//! The client/server protocol of MariaDB and MySQL, as it is spoken since MySQL 4.1 (`CLIENT_PROTOCOL_41`). Pure: no IO.
//!
//! ```text
//! server  greeting                OK            columns rows end        ...
//! client         response (login)    COM_QUERY                  COM_QUIT
//!         └──────── handshake ──────┘└────── an exchange ──────┘
//! ```
//!
//! * [`packet`]: framing; a *message* is one payload, perhaps in several packets of 16 MiB.
//! * [`auth`]: what proves a password. [`handshake`]: greeting, login, TLS upgrade, compression, attributes of the connection.
//! * [`command`]: what a client asks for. [`value`]: parameters of the binary protocol.
//! * [`response`]: OK, ERR, EOF and the others. [`exchange`]: which of them answer a command, and where the answer ends.
//!
//! Sources: "MariaDB Server Documentation, Clients & Utilities, Protocol" and "MySQL Source Code Documentation, Client/Server
//! Protocol". Verified on MariaDB 10.11 by the tests of the tracer; what MySQL 8 adds (query attributes, caching_sha2_password)
//! is tested on streams typed by hand only.
#![forbid(unsafe_code)]

pub mod auth;
pub mod capability;
pub mod command;
mod error;
pub mod exchange;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handshake;
pub mod packet;
mod reader;
pub mod response;
pub mod value;

pub use error::Error;
