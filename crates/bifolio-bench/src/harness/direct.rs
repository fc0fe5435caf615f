//! Files without the kernel's page cache: opened past it, or dropped from it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{Advice, OFlags, fadvise};
use rustix::io::pread;

use super::access::PAGE_BYTES;
use crate::error::{Error, Result};

/// A page with the alignment that direct transfers need.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(crate) struct Page(pub(crate) [u8; PAGE_BYTES]);

impl Page {
    pub(crate) fn zeroed() -> Box<Self> {
        Box::new(Self([0; PAGE_BYTES]))
    }
}

/// Opens `path` so that transfers bypass the page cache.
///
/// # Errors
/// The file system refuses; the message is the reason to skip a series.
pub(crate) fn open(path: &Path, write: bool) -> Result<File> {
    let flags = OFlags::DIRECT.bits() as i32;
    OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(flags)
        .open(path)
        .map_err(Error::system(format!("open {} past the page cache", path.display())))
}

/// Opens `path` past the page cache and tries one read: some file systems refuse only then.
pub(crate) fn probe(path: &Path) -> Result<()> {
    let file = open(path, false)?;
    let refused = Error::system(format!("read {} past the page cache", path.display()));
    pread(&file, &mut Page::zeroed().0, 0).map_err(refused)?;
    Ok(())
}

/// Makes the kernel drop all pages of `path`; they are written first.
pub(crate) fn drop_page_cache(path: &Path) -> Result<()> {
    let failed = || Error::system(format!("drop {} from the page cache", path.display()));
    let file = File::open(path).map_err(failed())?;
    file.sync_data().map_err(failed())?;
    fadvise(&file, 0, None, Advice::DontNeed).map_err(|errno| failed()(errno.into()))
}
