// SPDX-License-Identifier: Apache-2.0
//! A server's side of a login with arbitrary messages.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    underpass_auth::fuzzing::server_auth(data);
});
