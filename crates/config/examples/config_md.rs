// SPDX-License-Identifier: Apache-2.0
//! Prints docs/config.md: `cargo run -p underpass-config --example config_md > docs/config.md`.

fn main() {
    print!("{}", underpass_config::config_md());
}
