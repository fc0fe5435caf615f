//! A segment file that is read in slices.
//!
//! tantivy asks for slices of a few bytes (the postings of a rare term) up to whole files (a term
//! dictionary) and keeps the long ones while a segment is open. Short slices are copied: one
//! transfer reads all pages of a slice that is not resident, where a map would fault for each.
//! Long slices are parts of a map, so their memory is inside the bound of the cache, and only the
//! pages that are used are read.
//!
//! # Safety
//! A slice of a map points into the address space of the region of an immutable file. The slice
//! keeps the map, and the map keeps the file open.

#![allow(unsafe_code)]

use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

use bifolio::{Cache, ErrorKind, ImmutableFile, Map, OpenOptions};
use stable_deref_trait::StableDeref;
use tantivy::HasLen;
use tantivy::directory::{FileHandle, OwnedBytes};

/// Longest slice that is copied. With 16 KiB, and with copies of all slices of postings and stored
/// fields, queries of an index of 8 x the memory are about as fast.
const COPIED_BYTES_MAX: usize = 64 << 10;

/// A segment file, open for reading.
pub(crate) struct Slices {
    file: ImmutableFile,
    len: usize,
    /// `None` if the file is empty or the kernel cannot map it: then all slices are copied.
    map: Option<Arc<Map<ImmutableFile>>>,
}

impl Slices {
    /// Opens the file at `path`. No handle that can write it may exist.
    pub(crate) fn open(cache: &Cache, path: &Path) -> io::Result<Self> {
        let options = OpenOptions::new();
        let file = match cache.open_immutable(path, &options.clone().mappable(true)) {
            Err(error) if error.kind() == ErrorKind::CannotMap => {
                let file = cache.open_immutable(path, &options)?;
                return Ok(Self { len: file.len() as usize, file, map: None });
            }
            opened => opened?,
        };
        let map = if file.len() == 0 { None } else { Some(Arc::new(file.map(0..file.len())?)) };
        Ok(Self { len: file.len() as usize, file, map })
    }
}

impl fmt::Debug for Slices {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Slices").field("file", &self.file).finish_non_exhaustive()
    }
}

impl HasLen for Slices {
    fn len(&self) -> usize {
        self.len
    }
}

impl FileHandle for Slices {
    fn read_bytes(&self, range: Range<usize>) -> io::Result<OwnedBytes> {
        match &self.map {
            Some(map) if range.len() > COPIED_BYTES_MAX => {
                MappedSlice::new(map, range).map(OwnedBytes::new)
            }
            _ => {
                let mut bytes = vec![0; range.len()];
                self.file.read_exact_at(&mut bytes, range.start as u64)?;
                Ok(OwnedBytes::new(bytes))
            }
        }
    }
}

/// A part of a map.
struct MappedSlice {
    map: Arc<Map<ImmutableFile>>,
    range: Range<usize>,
}

impl MappedSlice {
    fn new(map: &Arc<Map<ImmutableFile>>, range: Range<usize>) -> io::Result<Self> {
        if range.end as u64 > map.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Self { map: Arc::clone(map), range })
    }
}

impl Deref for MappedSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map.as_bytes()[self.range.clone()]
    }
}

// SAFETY: the bytes are at the address of the file's region. They do not move with this value, and
// stay while the map exists.
unsafe impl StableDeref for MappedSlice {}
