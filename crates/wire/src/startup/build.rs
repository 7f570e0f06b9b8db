// SPDX-License-Identifier: Apache-2.0
//! Builders of the first packets, for connections to servers.

use super::{CANCEL_REQUEST_CODE, GSSENC_REQUEST_CODE, ProtocolVersion, SSL_REQUEST_CODE};
use crate::builder::{counted, cstr, u32, until_nul};

/// A StartupMessage. An empty name would end the list early, so such a pair is left out.
/// PostgreSQL refuses more than [`MAX_LEN`](super::MAX_LEN) bytes.
pub fn startup_message<'a>(
    out: &mut Vec<u8>,
    version: ProtocolVersion,
    parameters: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
) {
    counted(out, |out| {
        u32(out, version.to_word());
        for (name, value) in parameters.into_iter().filter(|(name, _)| !until_nul(name).is_empty()) {
            cstr(out, name);
            cstr(out, value);
        }
        out.push(0);
    });
}

/// A CancelRequest with the key exactly as the server gave it (4 bytes, with protocol 3.2 up to 256).
pub fn cancel_request(out: &mut Vec<u8>, process_id: u32, secret_key: &[u8]) {
    counted(out, |out| {
        u32(out, CANCEL_REQUEST_CODE);
        u32(out, process_id);
        out.extend_from_slice(secret_key);
    });
}

/// An SSLRequest.
pub fn ssl_request(out: &mut Vec<u8>) {
    counted(out, |out| u32(out, SSL_REQUEST_CODE));
}

/// A GSSENCRequest.
pub fn gssenc_request(out: &mut Vec<u8>) {
    counted(out, |out| u32(out, GSSENC_REQUEST_CODE));
}
