// SPDX-License-Identifier: Apache-2.0
//! Attaching the programs to their socket maps, and the verifier's words when the kernel refuses one.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::io;
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
    let fd = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
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
