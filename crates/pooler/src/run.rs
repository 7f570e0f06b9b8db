// SPDX-License-Identifier: Apache-2.0
//! Start and stop of the process.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use anyhow::Context as _;
use arc_swap::{ArcSwap, ArcSwapOption};
use nix::sys::signal::{SigSet, Signal};
use rustix::event::epoll;
use underpass_config::{Config, UnixSocketDir};
use underpass_pool::Core;
use underpass_pool::prepared::Statements;

use crate::lanes::Lanes;
use crate::gather::Periods;
use crate::net;
use underpass_console::Timestamp;
use crate::resolver::Resolver;
use crate::settings::Settings;
use crate::shared::{Mailbox, Names, Shared, phase};
use crate::worker::{Listener, Worker};

/// How the pooler is started.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// pgbouncer.ini, and files that are laid over it.
    pub config_paths: Vec<PathBuf>,
    /// `-d`
    pub daemonize: bool,
    /// `-v`, as often as given.
    pub verbose: u32,
    /// `-q`: nothing on standard error.
    pub quiet: bool,
    /// `-u`: the user to run as; overrides `user`.
    pub user: Option<String>,
}

/// Reads the configuration and everything it names, as a start would, and returns its warnings.
///
/// # Errors
/// The first thing that would keep the pooler from starting.
pub fn check(paths: &[PathBuf]) -> anyhow::Result<Vec<String>> {
    Settings::load(paths).map(|(_, warnings)| warnings)
}

/// Runs the pooler until a signal or SHUTDOWN ends it.
///
/// # Errors
/// What keeps it from starting, with a next step.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let (settings, warnings) = Settings::load(&options.config_paths)?;
    let config = &settings.config;
    refuse_root(config, options)?;
    raise_descriptor_limit(config);
    let listeners = listen(config)?;
    // With the privileges of the start: programs and maps are made here and only used later.
    let lanes = Lanes::open(config)?.map(Arc::new);
    let user = options.user.clone().or_else(|| config.user.clone());
    if let (Some(user), true) = (&user, rustix::process::getuid().is_root()) {
        become_user(user)?;
    }
    let threads = config.underpass.threads.filter(|&threads| threads > 0).map_or_else(
        || std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        |threads| threads as usize,
    );
    let mut mailboxes = Vec::with_capacity(threads);
    for _ in 0..threads {
        mailboxes.push(Mailbox::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?);
    }
    // Signals are taken by one thread; the others never see them.
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2] {
        signals.add(signal);
    }
    signals.thread_block()?;
    let shared = Arc::new(Shared {
        core: Mutex::new(Core::default()),
        statements: Statements::default(),
        parameters: Mutex::default(),
        names: std::sync::RwLock::new(Names::default()),
        mailboxes,
        cancel_keys: Mutex::new(HashMap::default()),
        clients: AtomicU32::new(0),
        next_socket: AtomicU32::new(0),
        phase: AtomicU8::new(phase::RUNNING),
        epoch: AtomicU64::new(0),
        resolver: Resolver::start()?,
        lanes,
        started: Instant::now(),
        started_wall: SystemTime::now(),
        last_error: ArcSwapOption::empty(),
        periods: Mutex::new(Periods::new(Timestamp(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros() as u64))),
        settings: ArcSwap::from_pointee(settings),
    });
    for warning in warnings {
        log::warn!("{warning}");
    }
    for database in shared.settings.load().config.databases.named.values() {
        shared.database_state(database.clone(), false);
    }
    let mut workers = Vec::new();
    for index in 0..threads {
        let worker = Worker::new(index as u16, shared.clone(), listeners.clone());
        workers.push(
            std::thread::Builder::new().name(format!("worker {index}")).spawn(move || worker.run()).context("cannot start a thread")?,
        );
    }
    log::info!("process up: underpass {}, {threads} threads", env!("CARGO_PKG_VERSION"));
    while !signal_loop_step(&shared, &signals)? {}
    for worker in workers {
        match worker.join() {
            Ok(result) => result?,
            Err(_) => anyhow::bail!("a worker thread panicked"),
        }
    }
    if let Some(summary) = crate::kernel_rows::summary(&shared) {
        log::info!("{summary}");
    }
    Ok(())
}

/// Waits for one signal and acts on it; true when the process is to end.
fn signal_loop_step(shared: &Arc<Shared>, signals: &SigSet) -> anyhow::Result<bool> {
    match signals.wait()? {
        Signal::SIGINT | Signal::SIGTERM | Signal::SIGQUIT => {
            shared.phase.store(phase::IMMEDIATE, Ordering::Relaxed);
            shared.broadcast(|worker| worker.stopping = true);
            Ok(true)
        }
        _ => Ok(false),
    }
}

fn refuse_root(config: &Config, options: &Options) -> anyhow::Result<()> {
    let has_user = options.user.is_some() || config.user.is_some();
    if rustix::process::getuid().is_root() && !has_user {
        anyhow::bail!("will not run as root: set `user` in [pgbouncer], give -u USER, or start as another user");
    }
    Ok(())
}

fn become_user(name: &str) -> anyhow::Result<()> {
    let user = nix::unistd::User::from_name(name)?.with_context(|| format!("user \"{name}\" does not exist: change `user`"))?;
    let c_name = std::ffi::CString::new(name)?;
    nix::unistd::initgroups(&c_name, user.gid)?;
    nix::unistd::setgid(user.gid)?;
    nix::unistd::setuid(user.uid)?;
    Ok(())
}

/// Descriptors: one for each client and server, some for everything else.
fn raise_descriptor_limit(config: &Config) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let pools = config.databases.len().max(1) as u64;
    let needed = u64::from(config.max_client_conn) + pools * u64::from(config.default_pool_size + config.reserve_pool_size) + 200;
    if soft >= needed {
        return;
    }
    let wanted = needed.max(soft).min(hard);
    if setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).is_err() || wanted < needed {
        log::warn!("{needed} file descriptors may be needed, {wanted} are allowed: raise LimitNOFILE (ulimit -n)");
    }
}

fn listen(config: &Config) -> anyhow::Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    let port = config.listen_port;
    let backlog = config.listen_backlog as i32;
    for name in config.listen_addr.iter() {
        let addresses: Vec<SocketAddr> = if name == "*" {
            vec![(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port).into(), (IpAddr::V6(Ipv6Addr::UNSPECIFIED), port).into()]
        } else {
            (name, port).to_socket_addrs().with_context(|| format!("listen_addr: cannot resolve {name}"))?.collect()
        };
        for address in addresses {
            match net::listen_tcp(address, backlog, config.so_reuseport) {
                Ok(fd) => {
                    log::info!("listening on {address}");
                    listeners.push(Listener { fd: Arc::new(fd), unix_port: None });
                }
                // A machine without IPv6 is served on IPv4.
                Err(error) if name == "*" && address.is_ipv6() => log::debug!("cannot listen on {address}: {error}"),
                Err(error) => anyhow::bail!("cannot listen on {address}: {error}; is another pooler running? change listen_port or stop it"),
            }
        }
    }
    let socket = match &config.unix_socket_dir {
        UnixSocketDir::Off => None,
        UnixSocketDir::Path(directory) => Some(directory.join(format!(".s.PGSQL.{port}"))),
        UnixSocketDir::Abstract(prefix) => Some(PathBuf::from(format!("@{prefix}/.s.PGSQL.{port}"))),
    };
    if let Some(path) = socket {
        let fd = net::listen_unix(&path, backlog)
            .with_context(|| format!("cannot listen on unix socket {}: change unix_socket_dir or stop the other process", path.display()))?;
        if matches!(config.unix_socket_dir, UnixSocketDir::Path(_)) {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(config.unix_socket_mode))?;
        }
        log::info!("listening on unix:{}", path.display());
        listeners.push(Listener { fd: Arc::new(fd), unix_port: Some(port) });
    }
    anyhow::ensure!(!listeners.is_empty(), "nowhere to listen: set listen_addr or unix_socket_dir");
    Ok(listeners)
}
