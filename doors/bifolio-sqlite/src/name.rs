//! The name of a main database as SQLite passes it to `xOpen`: a path, followed in memory by the
//! parameters of its URI.
//!
//! # Safety
//! Reads the texts behind the path, as `sqlite3_uri_parameter` does: pairs of a key and a value, up
//! to an empty key.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Zero bytes before the path and after the parameters: SQLite looks back to find the path of a
/// journal's name, and expects the names of journal and log behind the parameters.
const MARGIN_BYTES: usize = 4;

/// A copy of a name, which outlives the connection that it came from.
#[derive(PartialEq, Eq)]
pub(crate) struct FileName {
    bytes: Box<[u8]>,
}

impl FileName {
    /// # Safety
    /// `name` is what SQLite gave to `xOpen` for a main database.
    pub(crate) unsafe fn copy(name: *const c_char) -> Self {
        let mut bytes = vec![0; MARGIN_BYTES];
        let mut next = name;
        let mut take = |bytes: &mut Vec<u8>| {
            // SAFETY: a text, by the contract: each is followed by another up to the empty key.
            let text = unsafe { CStr::from_ptr(next) };
            bytes.extend_from_slice(text.to_bytes_with_nul());
            next = next.wrapping_add(text.count_bytes() + 1);
            text.is_empty()
        };
        take(&mut bytes);
        while !take(&mut bytes) {
            take(&mut bytes);
        }
        bytes.extend_from_slice(&[0; MARGIN_BYTES]);
        Self { bytes: bytes.into_boxed_slice() }
    }

    /// Pointer for a VFS.
    pub(crate) fn as_ptr(&self) -> *const c_char {
        self.bytes[MARGIN_BYTES..].as_ptr().cast()
    }

    pub(crate) fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(self.texts().next().unwrap_or_default()))
    }

    /// Keys and values of the URI.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut texts = self.texts().skip(1);
        std::iter::from_fn(move || {
            let key = texts.next().filter(|key| !key.is_empty())?;
            Some((key, texts.next().unwrap_or_default()))
        })
        .filter_map(|(key, value)| Some((str::from_utf8(key).ok()?, str::from_utf8(value).ok()?)))
    }

    fn texts(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes[MARGIN_BYTES..].split(|byte| *byte == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_path_and_the_parameters() {
        let given = b"/tmp/x.db\0mode\0ro\0empty\0\0bifolio_memory\x008MiB\0\0/tmp/x.db-journal\0";
        // SAFETY: texts in the order of SQLite.
        let name = unsafe { FileName::copy(given.as_ptr().cast()) };
        assert_eq!(name.path(), Path::new("/tmp/x.db"));
        let found: Vec<_> = name.parameters().collect();
        assert_eq!(found, [("mode", "ro"), ("empty", ""), ("bifolio_memory", "8MiB")]);
        // SAFETY: as above, without parameters.
        let name = unsafe { FileName::copy([b'x', 0, 0].as_ptr().cast()) };
        assert_eq!((name.path(), name.parameters().count()), (Path::new("x"), 0));
    }
}
