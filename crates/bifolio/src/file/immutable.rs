//! Files that do not change while they are open.

use super::{File, PageRef};
use crate::error::Result;
use std::ops::{Deref, Range};

/// A file whose bytes do not change while it is open, so that they can be borrowed as `&[u8]`.
/// From [`Cache::open_immutable`](crate::Cache::open_immutable).
///
/// Dereferences to the [`File`], for all calls that read. Cheap to clone; clones share one handle.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("file");
/// # std::fs::write(&path, b"0123456789")?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// let index = cache.open_immutable(&path, &bifolio::OpenOptions::new())?;
/// let page = index.pin(2..6)?;
/// assert_eq!(&page[..], b"2345");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ImmutableFile {
    file: File,
}

impl ImmutableFile {
    /// Returns a file whose handle is registered as immutable.
    pub(super) fn new(file: File) -> Self {
        Self { file }
    }

    /// Pins the bytes of `range`, like [`File::pin`], and lends them as a slice. Blocks for I/O on
    /// a miss.
    ///
    /// # Errors
    /// As [`File::pin`].
    #[inline(always)]
    pub fn pin(&self, range: Range<u64>) -> Result<PageRef<'_, Self>> {
        Ok(self.file.pin(range)?.of_immutable())
    }

    /// Pins the bytes of each range, like [`File::pin_many`], and lends them as slices. Blocks
    /// until all ranges have a result.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let index = cache.open_immutable(&path, &bifolio::OpenOptions::new())?;
    /// let pages = index.pin_many(&[0..100, 50_000..50_100, 99_999..100_001]);
    /// assert_eq!(pages[1].as_ref().unwrap()[..], [7; 100]);
    /// assert!(pages[2].is_err(), "it ends past the end of file");
    /// # Ok(())
    /// # }
    /// ```
    pub fn pin_many(&self, ranges: &[Range<u64>]) -> Vec<Result<PageRef<'_, Self>>> {
        let pages = self.file.pin_many(ranges).into_iter();
        pages.map(|page| page.map(PageRef::of_immutable)).collect()
    }
}

impl Deref for ImmutableFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl From<ImmutableFile> for File {
    fn from(immutable: ImmutableFile) -> Self {
        immutable.file
    }
}
