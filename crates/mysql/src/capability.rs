// SPDX-License-Identifier: Apache-2.0
//! Capability flags: what both ends agree to use. The lower 32 bits are MySQL's; the upper ones MariaDB's own, which it sends where
//! MySQL has reserved bytes, when `CLIENT_LONG_PASSWORD` is not set.

/// MySQL; MariaDB clears it to tell that it is not.
pub const LONG_PASSWORD: u64 = 1;
/// The login names a database.
pub const CONNECT_WITH_DB: u64 = 1 << 3;
/// Packets are compressed after the login, by zlib.
pub const COMPRESS: u64 = 1 << 5;
/// The protocol of MySQL 4.1 and later.
pub const PROTOCOL_41: u64 = 1 << 9;
/// TLS after the first packet of the client.
pub const SSL: u64 = 1 << 11;
/// Status flags in OK packets.
pub const TRANSACTIONS: u64 = 1 << 13;
/// Passwords of 20 bytes with a length before them.
pub const SECURE_CONNECTION: u64 = 1 << 15;
/// Several statements in one COM_QUERY.
pub const MULTI_STATEMENTS: u64 = 1 << 16;
/// Several results of one COM_QUERY.
pub const MULTI_RESULTS: u64 = 1 << 17;
/// Several results of one COM_STMT_EXECUTE.
pub const PS_MULTI_RESULTS: u64 = 1 << 18;
/// The name of the authentication plugin is told.
pub const PLUGIN_AUTH: u64 = 1 << 19;
/// Attributes of the connection are told.
pub const CONNECT_ATTRS: u64 = 1 << 20;
/// The login's authentication data has a length-encoded length.
pub const PLUGIN_AUTH_LENENC: u64 = 1 << 21;
/// No EOF packet behind columns; an OK packet with the first byte of an EOF packet behind rows.
pub const DEPRECATE_EOF: u64 = 1 << 24;
/// The client may switch off the columns of results, each of which then begins with whether they follow.
pub const OPTIONAL_RESULTSET_METADATA: u64 = 1 << 25;
/// Packets are compressed after the login, by zstd.
pub const ZSTD_COMPRESSION: u64 = 1 << 26;
/// Attributes before the text of COM_QUERY (MySQL 8.0.23).
pub const QUERY_ATTRIBUTES: u64 = 1 << 27;
/// Progress reports instead of an answer, until there is one.
pub const MARIADB_PROGRESS: u64 = 1 << 32;

/// A set of flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Whether all flags of `mask` are there.
    pub fn has(self, mask: u64) -> bool {
        self.0 & mask == mask
    }

    /// Whether what follows the login is compressed.
    pub fn compressed(self) -> bool {
        self.0 & (COMPRESS | ZSTD_COMPRESSION) != 0
    }
}
