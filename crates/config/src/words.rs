// SPDX-License-Identifier: Apache-2.0
//! Values that are one word of a fixed set. Case does not matter, as in PgBouncer.

use crate::value::Value;

macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vmeta])* $variant,)+ }

        impl $name {
            /// All words, in the order of the manual.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The word as files and SHOW commands have it.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }

            /// The variant of a word, in any case.
            pub fn from_word(word: &str) -> Option<Self> {
                $(if word.eq_ignore_ascii_case($word) { return Some(Self::$variant); })+
                None
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl Value for $name {
            const TYPE: &'static str = words!(@join $($word)+);
            fn parse(text: &str) -> Result<Self, String> {
                Self::from_word(text).ok_or_else(|| format!("one of {}", Self::WORDS.join(", ")))
            }
            fn show(&self) -> Option<String> {
                Some(self.as_str().to_owned())
            }
        }
    };
    (@join $first:literal $($rest:literal)*) => { concat!($first $(, ", ", $rest)*) };
}

words! {
    /// `pool_mode`: when a server connection goes back to its pool.
    PoolMode {
        /// When the client disconnects.
        Session = "session",
        /// When the transaction ends.
        Transaction = "transaction",
        /// When the statement ends; transactions of several statements are refused.
        Statement = "statement",
    }
}

words! {
    /// `auth_type`: how clients prove who they are.
    AuthType {
        /// The client's user name is ignored; every database must have a forced user.
        Any = "any",
        /// No check, but the user must exist.
        Trust = "trust",
        /// Clear-text password.
        Plain = "plain",
        /// MD5; SCRAM for users whose stored secret is SCRAM.
        Md5 = "md5",
        /// TLS client certificate, CN = user.
        Cert = "cert",
        /// By the rules of `auth_hba_file`.
        Hba = "hba",
        /// SCRAM-SHA-256.
        ScramSha256 = "scram-sha-256",
    }
}

words! {
    /// `client_tls_sslmode`, `server_tls_sslmode`.
    SslMode {
        /// No TLS.
        Disable = "disable",
        /// TLS if the client asks.
        Allow = "allow",
        /// TLS if the other side can.
        Prefer = "prefer",
        /// TLS or nothing; certificates are not verified.
        Require = "require",
        /// And the certificate chain is verified.
        VerifyCa = "verify-ca",
        /// And the server's name is verified.
        VerifyFull = "verify-full",
    }
}

words! {
    /// `load_balance_hosts` of a database with several hosts.
    LoadBalanceHosts {
        /// Each new server connection goes to the next host.
        RoundRobin = "round-robin",
        /// Stay with a host until it fails.
        Disable = "disable",
    }
}

words! {
    /// `[underpass] log_format`.
    LogFormat {
        /// PgBouncer's lines.
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
}

words! {
    /// `[underpass] kernel_path`: whether links are forwarded inside the kernel.
    KernelPath {
        /// Where the self-test passes.
        Auto = "auto",
        /// Never.
        Off = "off",
        /// Refuse to start where the self-test does not pass.
        Require = "require",
    }
}

words! {
    /// `mode` of a mirror.
    MirrorMode {
        /// Clients never wait for it.
        Async = "async",
        /// A client waits until it is ready, see [`SyncEach`].
        Sync = "sync",
    }
}

words! {
    /// `sync_each` of a mirror: what waits in `mode = sync`, and what is passed on at once.
    SyncEach {
        /// The client's next statement, until the mirror has answered the last one.
        Statement = "statement",
        /// The client's next transaction, until the mirror has executed the last one.
        Transaction = "transaction",
    }
}

words! {
    /// `send` of a mirror.
    MirrorSend {
        /// Every transaction.
        All = "all",
        /// Transactions that only read.
        ReadOnly = "read_only",
    }
}

words! {
    /// `overflow` of a mirror: what happens when its queue has no room.
    MirrorOverflow {
        /// The transaction is dropped.
        Drop = "drop",
        /// The mirror is disabled.
        Disable = "disable",
    }
}

words! {
    /// `compare_rows` of a mirror.
    CompareRows {
        /// Their number only.
        Off = "off",
        /// As a set with multiplicities.
        Unordered = "unordered",
        /// One by one.
        Ordered = "ordered",
    }
}

words! {
    /// `[underpass] same_host`: which processes of this host take part in kernel lanes by their own sockets.
    SameHost {
        /// None: every link is treated as if both sides were remote.
        Off = "off",
        /// PostgreSQL's backends.
        Server = "server",
        /// Backends and applications.
        Both = "both",
    }
}

words! {
    /// `[underpass] trace_level`: how much of the responses a recording has.
    TraceLevel {
        /// Only when the server was ready again.
        None = "none",
        /// Tags, rows, SQLSTATE, latencies.
        Summary = "summary",
        /// All bytes.
        Full = "full",
    }
}
