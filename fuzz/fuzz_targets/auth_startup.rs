// SPDX-License-Identifier: Apache-2.0
//! A client from its first byte through its login, cut in any way.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    underpass_auth::fuzzing::startup(data);
});
