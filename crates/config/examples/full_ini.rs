// SPDX-License-Identifier: Apache-2.0
//! Prints etc/underpass.ini, every key with its default:
//! `cargo run -p underpass-config --example full_ini > etc/underpass.ini`.

fn main() {
    print!("{}", underpass_config::full_ini());
}
