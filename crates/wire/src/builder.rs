// SPDX-License-Identifier: Apache-2.0
//! What all builders share: a frame with its length filled in at the end, strings, values.
//!
//! A builder never makes a malformed frame. A string ends at its first NUL, as it does for every C program on
//! the other side; a body above 2 GiB is a bug of the caller and panics.

/// Appends one typed message whose body `fill` appends.
pub(crate) fn message(out: &mut Vec<u8>, tag: u8, fill: impl FnOnce(&mut Vec<u8>)) {
    out.push(tag);
    counted(out, fill);
}

/// Appends an Int32 that counts itself and what `fill` appends: a first packet, or the rest of a message.
pub(crate) fn counted(out: &mut Vec<u8>, fill: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    fill(out);
    let len = i32::try_from(out.len() - start).expect("message body above 2 GiB");
    out[start..start + 4].copy_from_slice(&len.to_be_bytes());
}

/// The part of `text` before its first NUL.
pub(crate) fn until_nul(text: &[u8]) -> &[u8] {
    memchr::memchr(0, text).map_or(text, |nul| &text[..nul])
}

pub(crate) fn cstr(out: &mut Vec<u8>, text: &[u8]) {
    out.extend_from_slice(until_nul(text));
    out.push(0);
}

pub(crate) fn u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_be_bytes());
}

pub(crate) fn u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_be_bytes());
}

/// An Int16 count and the items. Panics above 65535 items, which no message can have.
pub(crate) fn list<T>(
    out: &mut Vec<u8>,
    items: impl IntoIterator<Item = T>,
    mut put: impl FnMut(&mut Vec<u8>, T),
) {
    let start = out.len();
    u16(out, 0);
    let mut count = 0u16;
    for item in items {
        count = count.checked_add(1).expect("more than 65535 items in a message");
        put(out, item);
    }
    out[start..start + 2].copy_from_slice(&count.to_be_bytes());
}

/// A value with its Int32 length, or -1 for null.
pub(crate) fn value(out: &mut Vec<u8>, value: Option<&[u8]>) {
    match value {
        None => out.extend_from_slice(&(-1i32).to_be_bytes()),
        Some(bytes) => {
            let len = i32::try_from(bytes.len()).expect("value above 2 GiB");
            out.extend_from_slice(&len.to_be_bytes());
            out.extend_from_slice(bytes);
        }
    }
}
