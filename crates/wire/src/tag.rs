// SPDX-License-Identifier: Apache-2.0
//! The type bytes of all messages (PostgreSQL manual, "Message Formats").
//!
//! The same byte often means different things in the two directions, hence two modules.

macro_rules! tags {
    ($($(#[$doc:meta])* $name:ident = $byte:literal => $text:literal,)*) => {
        $($(#[$doc])* pub const $name: u8 = $byte;)*

        /// All types of this direction, in the order of the constants.
        pub const ALL: &[u8] = &[$($name),*];

        /// The message's name in the manual, `"?"` when the direction has no such type.
        pub const fn name(tag: u8) -> &'static str {
            match tag {
                $($name => $text,)*
                _ => "?",
            }
        }
    };
}

/// Types that a client sends.
pub mod frontend {
    tags! {
        /// Extended query: binds parameters, makes a portal.
        BIND = b'B' => "Bind",
        /// Extended query: forgets a statement or portal.
        CLOSE = b'C' => "Close",
        /// A part of a COPY stream; both directions.
        COPY_DATA = b'd' => "CopyData",
        /// The end of a COPY stream; both directions.
        COPY_DONE = b'c' => "CopyDone",
        /// The client gives up COPY IN.
        COPY_FAIL = b'f' => "CopyFail",
        /// Extended query: asks for the shape of a statement or portal.
        DESCRIBE = b'D' => "Describe",
        /// Extended query: runs a portal.
        EXECUTE = b'E' => "Execute",
        /// Asks the server to send what it holds back.
        FLUSH = b'H' => "Flush",
        /// The old fast-path call of a function.
        FUNCTION_CALL = b'F' => "FunctionCall",
        /// Extended query: prepares a statement.
        PARSE = b'P' => "Parse",
        /// PasswordMessage, SASLInitialResponse, SASLResponse and GSSResponse: the phase tells which.
        PASSWORD = b'p' => "PasswordMessage",
        /// Simple query.
        QUERY = b'Q' => "Query",
        /// Extended query: ends the cycle.
        SYNC = b'S' => "Sync",
        /// The client leaves.
        TERMINATE = b'X' => "Terminate",
    }
}

/// Types that a server sends.
pub mod backend {
    tags! {
        /// All AuthenticationXXX messages; the first word of the body tells which.
        AUTHENTICATION = b'R' => "Authentication",
        /// What a CancelRequest must carry.
        BACKEND_KEY_DATA = b'K' => "BackendKeyData",
        /// Answers Bind.
        BIND_COMPLETE = b'2' => "BindComplete",
        /// Answers Close.
        CLOSE_COMPLETE = b'3' => "CloseComplete",
        /// The end of one statement.
        COMMAND_COMPLETE = b'C' => "CommandComplete",
        /// A part of a COPY stream; both directions.
        COPY_DATA = b'd' => "CopyData",
        /// The end of a COPY stream; both directions.
        COPY_DONE = b'c' => "CopyDone",
        /// The server now takes COPY data.
        COPY_IN_RESPONSE = b'G' => "CopyInResponse",
        /// The server now sends COPY data.
        COPY_OUT_RESPONSE = b'H' => "CopyOutResponse",
        /// Both at once: streaming replication.
        COPY_BOTH_RESPONSE = b'W' => "CopyBothResponse",
        /// One row.
        DATA_ROW = b'D' => "DataRow",
        /// The end of an empty query string.
        EMPTY_QUERY_RESPONSE = b'I' => "EmptyQueryResponse",
        /// An error; the transaction or the connection ends.
        ERROR_RESPONSE = b'E' => "ErrorResponse",
        /// The result of FunctionCall.
        FUNCTION_CALL_RESPONSE = b'V' => "FunctionCallResponse",
        /// The server does not speak the asked minor version or options.
        NEGOTIATE_PROTOCOL_VERSION = b'v' => "NegotiateProtocolVersion",
        /// Describe: no rows will come.
        NO_DATA = b'n' => "NoData",
        /// A warning or notice; at any time.
        NOTICE_RESPONSE = b'N' => "NoticeResponse",
        /// NOTIFY of some session; at any time.
        NOTIFICATION_RESPONSE = b'A' => "NotificationResponse",
        /// Describe: types of a statement's parameters.
        PARAMETER_DESCRIPTION = b't' => "ParameterDescription",
        /// The value of a reported parameter; at any time.
        PARAMETER_STATUS = b'S' => "ParameterStatus",
        /// Answers Parse.
        PARSE_COMPLETE = b'1' => "ParseComplete",
        /// Execute reached its row limit.
        PORTAL_SUSPENDED = b's' => "PortalSuspended",
        /// The end of a cycle, with the transaction status.
        READY_FOR_QUERY = b'Z' => "ReadyForQuery",
        /// Names and types of the columns that follow.
        ROW_DESCRIPTION = b'T' => "RowDescription",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(frontend::name(frontend::QUERY), "Query");
        assert_eq!(frontend::name(b'C'), "Close");
        assert_eq!(backend::name(b'C'), "CommandComplete");
        assert_eq!(backend::name(0), "?");
        assert_eq!(frontend::ALL.len(), 14);
        assert_eq!(backend::ALL.len(), 24);
    }

    #[test]
    fn types_are_distinct_per_direction() {
        for all in [frontend::ALL, backend::ALL] {
            let mut sorted = all.to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), all.len());
        }
    }
}
