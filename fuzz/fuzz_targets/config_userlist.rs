// SPDX-License-Identifier: Apache-2.0
//! See `underpass_config::fuzzing::userlist`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| underpass_config::fuzzing::userlist(data));
