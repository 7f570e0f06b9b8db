// SPDX-License-Identifier: Apache-2.0
//! Fixtures for tests of the pooler: they own real processes, and clean up when dropped, on panic, and when the test
//! process itself is killed.
//!
//! | what | type |
//! |---|---|
//! | a private PostgreSQL: trust, password, md5, SCRAM, TLS, own settings | [`Postgres`] |
//! | a private MariaDB, for the tracer | [`Mariadb`] |
//! | a pooler under test, ours or Debian's PgBouncer, from one [`Ini`] | [`Underpass`], [`PgBouncer`], [`Pooler`], [`PoolerKind`] |
//! | in which kernel lane a pooler's transactions were, and why not | [`Account`] |
//! | a blocking protocol 3 client with control over every byte | [`Client`], [`Batch`], [`Options`] |
//! | a PostgreSQL that follows a script | [`MockServer`], [`Step`], [`Reply`] |
//! | a TCP relay that splits, delays, stalls, cuts and resets | [`FaultProxy`], [`Fault`] |
//! | certificates | [`Authority`], [`Identity`] |
//! | a port that no other test gets | [`Port`] |
//! | a page in a browser, where there is one | [`assert_every_plot_is_drawn`] |
//! | a disk that is soon full (root) | [`SmallDisk`] |
//! | network namespaces joined by a veth pair (root) | [`Netns`], [`Veth`] |
//!
//! ```no_run
//! use underpass_testkit::{Client, Ini, PoolerKind, Postgres};
//!
//! # fn main() -> underpass_testkit::Result<()> {
//! let server = Postgres::start()?;
//! let ini = Ini::for_server(&server).set("pool_mode", "transaction");
//! for kind in PoolerKind::ALL {
//!     let pooler = kind.start(&ini)?;
//!     let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
//!     assert_eq!(client.query("select 1")?.value(), Some("1"));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Run as root, the fixtures start PostgreSQL and the pooler as user `postgres` (else `nobody`), since both refuse root.
//! `UNDERPASS_TEST_KERNEL_PATH=off` or `require` runs a test with the kernel lanes of our poolers off or required, unless its own ini says; who
//! has lanes is asked for its [`Account`] before it ends, and the test fails for a transaction in user space without a documented reason.
//! Everything listens on loopback; directories are under the system's temporary directory and go away with the fixture.

mod account;
mod browser;
mod client;
mod disk;
mod error;
mod mariadb;
mod message;
mod mock;
mod netns;
mod pooler;
mod port;
mod postgres;
mod process;
mod proxy;
mod stream;
mod template;
mod tls;

pub use account::Account;
pub use browser::assert_every_plot_is_drawn;
pub use client::{Client, Host, Options, Response, Tls};
pub use disk::SmallDisk;
pub use error::{Error, Result, ServerError};
pub use mariadb::Mariadb;
pub use message::{Batch, Message, Reply};
pub use mock::{MockServer, Step, StepCall};
pub use netns::{Netns, Veth};
pub use nix::sys::signal::Signal;
pub use pooler::{Ini, PgBouncer, Pooler, PoolerKind, Running, Underpass};
pub use port::Port;
pub use postgres::{AuthMethod, Postgres, PostgresBuilder};
pub use process::{Process, service_user};
pub use proxy::{Direction, Fault, FaultProxy};
pub use tls::{Authority, Identity};
