// SPDX-License-Identifier: Apache-2.0
//! Attaching the programs to their socket maps, and the verifier's words when the kernel refuses one.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use libbpf_rs::{MapCore, PrintLevel, ProgramImpl, libbpf_sys};

use crate::error::Error;

/// How much of libbpf's output an error carries; the verifier's verdict is at its end.
const LOG_TAIL_BYTES: usize = 4096;

/// An attached program: a link where the kernel has them for socket maps (6.10), else nothing to hold, because the
/// kernel detaches when the last user of the unpinned map is gone.
#[derive(Debug)]
pub(crate) struct Attachment {
    _link: Option<OwnedFd>,
}

/// Attaches an sk_skb verdict program.
pub(crate) fn skb_verdict<T>(program: &ProgramImpl<'_, T>, map: &impl MapCore) -> Result<Attachment, Error> {
    attach(program.as_fd().as_raw_fd(), map, libbpf_sys::BPF_SK_SKB_VERDICT)
}

/// Attaches an sk_msg verdict program.
pub(crate) fn msg_verdict<T>(program: &ProgramImpl<'_, T>, map: &impl MapCore) -> Result<Attachment, Error> {
    attach(program.as_fd().as_raw_fd(), map, libbpf_sys::BPF_SK_MSG_VERDICT)
}

fn attach(program: i32, map: &impl MapCore, kind: libbpf_sys::bpf_attach_type) -> Result<Attachment, Error> {
    let map = map.as_fd().as_raw_fd();
    // SAFETY: both descriptors are open; no options.
    let fd = unsafe { libbpf_sys::bpf_link_create(program, map, kind, std::ptr::null()) };
    if fd >= 0 {
        // SAFETY: a fresh descriptor that nobody else owns.
        return Ok(Attachment { _link: Some(unsafe { OwnedFd::from_raw_fd(fd) }) });
    }
    // SAFETY: both descriptors are open.
    let rc = unsafe { libbpf_sys::bpf_prog_attach(program, map, kind, 0) };
    if rc == 0 {
        return Ok(Attachment { _link: None });
    }
    Err(Error::System { what: "attaching a lane program", source: io::Error::from_raw_os_error(-rc) })
}

/// Reads what an iterator over files tells of one process, by the number that it has in our namespace of processes. Linux 6.1; older kernels may walk all of them.
pub(crate) fn iterate<T>(program: &ProgramImpl<'_, T>, pid: u32) -> io::Result<Vec<u8>> {
    let task = libbpf_sys::bpf_iter_link_info__bindgen_ty_3 { pid, ..Default::default() };
    let mut of = libbpf_sys::bpf_iter_link_info { task };
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        iter_info: &raw mut of,
        iter_info_len: size_of_val(&of) as u32,
        ..Default::default()
    };
    let program = program.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open; the options live and say their sizes.
    let link = owned(unsafe {
        libbpf_sys::bpf_link_create(program, 0, libbpf_sys::BPF_TRACE_ITER, &raw const options)
    })?;
    // SAFETY: the descriptor is open.
    let walk = owned(unsafe { libbpf_sys::bpf_iter_create(link.as_raw_fd()) })?;
    let mut told = Vec::new();
    File::from(walk).read_to_end(&mut told)?;
    Ok(told)
}

/// A descriptor that libbpf has just made, or the error that it says instead.
fn owned(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

thread_local! {
    static LOG: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Collects what libbpf prints on this thread until it is dropped.
pub(crate) struct Log;

pub(crate) fn capture_log() -> Log {
    LOG.set(Some(String::new()));
    libbpf_rs::set_print(Some((PrintLevel::Info, print)));
    Log
}

fn print(_: PrintLevel, text: String) {
    LOG.with_borrow_mut(|log| {
        if let Some(log) = log {
            log.push_str(&text);
        }
    });
}

impl Log {
    /// The error with the tail of the log.
    pub(crate) fn error(&self, cause: &libbpf_rs::Error) -> Error {
        let log = LOG.with_borrow(|log| log.clone().unwrap_or_default());
        let mut start = log.len().saturating_sub(LOG_TAIL_BYTES);
        while !log.is_char_boundary(start) {
            start += 1;
        }
        Error::Load { message: format!("{cause:#}\n{}", &log[start..]) }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        LOG.set(None);
    }
}

/// Has the kernel measure programs, all on this machine, until the descriptor is closed.
///
/// # Errors
/// The process lacks CAP_SYS_ADMIN.
pub fn measure_programs() -> io::Result<OwnedFd> {
    // SAFETY: takes and writes no memory.
    owned(unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) })
}

/// Verified instructions, runs, nanoseconds of a loaded program; zeros when the kernel does not tell.
pub(crate) fn cost<T>(program: &ProgramImpl<'_, T>) -> (u32, u64, u64) {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut len = size_of::<libbpf_sys::bpf_prog_info>() as u32;
    // SAFETY: info is as long as len says and all its pointers are null, so only plain fields are written.
    let rc = unsafe {
        libbpf_sys::bpf_obj_get_info_by_fd(program.as_fd().as_raw_fd(), (&raw mut info).cast(), &raw mut len)
    };
    if rc != 0 { (0, 0, 0) } else { (info.verified_insns, info.run_cnt, info.run_time_ns) }
}
