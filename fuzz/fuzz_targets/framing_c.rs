// SPDX-License-Identifier: Apache-2.0
//! The programs' C, compiled by `build.rs`, against the codec: see `crates/sockmap/tests/framing.rs`, whose model this shares.
#![no_main]

use std::ffi::c_char;

#[path = "../../crates/sockmap/tests/framing/model.rs"]
mod model;

#[link(name = "framing", kind = "static")]
unsafe extern "C" {
    fn framing_case(case: *const u8, size: usize, length: *mut usize) -> *const c_char;
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some(case) = model::Case::from_input(data) else { return };
    let bytes = case.encode();
    let mut length = 0;
    // SAFETY: it reads the case, writes the length, and returns so many bytes that stay until the next call; there is one thread.
    let text = unsafe {
        let text = framing_case(bytes.as_ptr(), bytes.len(), &mut length);
        assert!(!text.is_null(), "the programs' side reads the same cases");
        std::slice::from_raw_parts(text.cast::<u8>(), length)
    };
    let (expected, text) = (case.expected(), String::from_utf8_lossy(text));
    assert_eq!(text, expected, "left: the programs, right: the codec; {case:?}");
});
