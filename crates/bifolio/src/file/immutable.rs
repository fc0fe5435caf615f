//! Files that do not change while they are open: their pins are slices.

use super::pin::{OwnedPageRef, PageRef};
use super::{File, FileFuture, ImmutableFile};
use crate::error::{Error, Result};
use std::ops::{Range, RangeBounds};
use std::sync::Arc;

impl ImmutableFile {
    /// Pins the bytes of `range`, like [`File::pin`], with its errors, and lends them as a slice.
    /// Blocks for I/O on a miss.
    #[inline(always)]
    pub fn pin(&self, range: impl RangeBounds<u64>) -> Result<PageRef<'_, Self>> {
        self.file.pin_for(self.file.range_of(range))
    }

    /// Pins the bytes of `range` without blocking the thread that polls, like [`File::pin_async`].
    /// The pin is a slice that can be stored and sent, and is what `Bytes::from_owner` of the crate
    /// `bytes` takes.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # bifolio_testing::block_on(async {
    /// let table = cache.open_immutable(&path, &bifolio::OpenOptions::new())?;
    /// let page = table.pin_async(8192..12_288).await?;
    /// let owner: Box<dyn AsRef<[u8]> + Send> = Box::new(page);
    /// assert_eq!((*owner).as_ref(), [7; 4096]);
    /// # bifolio::Result::Ok(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pin_async(&self, range: impl RangeBounds<u64>) -> FileFuture<OwnedPageRef<Self>> {
        self.file.pin_async_of(range)
    }

    /// Pins the bytes of each range, like [`File::pin_many`], and lends them as slices. Blocks
    /// until all ranges have a result.
    pub fn pin_many(&self, ranges: &[Range<u64>]) -> Vec<Result<PageRef<'_, Self>>> {
        self.file.pin_each(ranges.iter().cloned())
    }

    /// Pins the bytes of each range, like [`File::pin_many_into`], and lends them as slices. Blocks
    /// until all ranges have a result.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let vectors = cache.open_immutable(&path, &bifolio::OpenOptions::new())?;
    /// let mut pages = Vec::new();
    /// for records in [[3_u64, 90, 41], [7, 3, 55]] {
    ///     let range = |record| record * 1024..(record + 1) * 1024;
    ///     vectors.pin_many_into(records.iter().map(range), &mut pages);
    ///     for page in &pages {
    ///         assert_eq!(page.as_ref().unwrap()[..], [7; 1024]);
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pin_many_into<'a>(
        &'a self,
        ranges: impl IntoIterator<Item = Range<u64>, IntoIter: Clone>,
        pages: &mut Vec<Result<PageRef<'a, Self>>>,
    ) {
        self.file.pin_each_into(ranges.into_iter(), pages);
    }
}

impl File {
    /// Makes an immutable handle of this one, for a file that has just been written, such as a
    /// table of an LSM tree: its pages stay in the cache. What is dirty is written back as before;
    /// sync first if it must be durable.
    ///
    /// # Errors
    /// [`OptionConflict`](crate::ErrorKind::OptionConflict): the file is not opened for reading, or
    /// may still change, through another writable handle, a clone of this one, or what keeps one (a
    /// map, an owned pin, a future, a checkpoint). This handle is closed then, as by a drop.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # use bifolio::{Cache, OpenOptions};
    /// # let cache = Cache::builder().memory(4 << 20).build()?;
    /// let options = OpenOptions::new().write(true).create_new(true);
    /// let table = cache.open(directory.path().join("000001.sst"), &options)?;
    /// table.append(b"sorted keys")?;
    /// table.sync_data()?;
    /// let table = table.into_immutable()?;
    /// assert_eq!(table.pin(0..6)?[..], *b"sorted");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_immutable(self) -> Result<ImmutableFile> {
        let handle = &self.handle;
        handle.check_readable()?;
        if Arc::strong_count(handle) > 1 {
            let text = "immutable: a clone of its handle, or a map or pin of it, is still in use";
            return Err(Error::conflict(handle.inode.name(), text.to_owned()));
        }
        let joined = handle.membership.join_immutable()?;
        Ok(ImmutableFile { file: Self::new(joined) })
    }
}

impl From<ImmutableFile> for File {
    fn from(immutable: ImmutableFile) -> Self {
        immutable.file
    }
}
