// SPDX-License-Identifier: Apache-2.0
//! See `underpass_mysql::fuzzing::messages`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| underpass_mysql::fuzzing::messages(data));
