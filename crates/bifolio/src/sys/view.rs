//! Mappings of memory that another process has made, or shares: a client's view of an owner's
//! frames and tables ([`SharedView`]), and memory of requests, which both write ([`SharedPages`]).
//!
//! Both are of files whose length is sealed: no process can cut them, so no access raises SIGBUS.

use super::memory::{HUGE_PAGE_BYTES, PAGE_BYTES, Reservation};
use super::shared::sealed_file;
use rustix::fs::SealFlags;
use rustix::mm::MprotectFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A part of another process's shared memory, mapped for reading only.
#[derive(Debug)]
pub(crate) struct SharedView(Reservation);

impl SharedView {
    /// Maps `length_bytes` bytes of `file`, from `offset_bytes` on, at an address that is aligned
    /// to `align_bytes`. Pages that nothing has written are read as zeros.
    ///
    /// # Errors
    /// A range that is not in the file, or not of whole pages; a file whose length may fall, which
    /// would raise SIGBUS here; a kernel that refuses the address space.
    pub(crate) fn new(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        length_bytes: u64,
        align_bytes: usize,
    ) -> io::Result<Self> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidInput, what);
        let file_bytes = rustix::fs::fstat(file)?.st_size as u64;
        let is_inside = offset_bytes.checked_add(length_bytes).is_some_and(|end| end <= file_bytes);
        let is_whole = |bytes: u64| bytes.is_multiple_of(PAGE_BYTES as u64);
        if !is_inside || !is_whole(offset_bytes) || !is_whole(length_bytes) {
            return Err(invalid("a part of the shared memory that does not exist"));
        }
        if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(invalid("shared memory whose length is not sealed"));
        }
        let length_bytes = usize::try_from(length_bytes).map_err(|_| invalid("too large"))?;
        let view = Reservation::of_file(
            file,
            offset_bytes,
            length_bytes,
            align_bytes,
            MprotectFlags::READ,
        )?;
        if align_bytes < HUGE_PAGE_BYTES {
            // Whatever the system's setting, a read must not make more than its page resident.
            view.refuse_huge_pages();
        }
        Ok(Self(view))
    }

    pub(crate) fn base(&self) -> *const u8 {
        self.0.base
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Memory of fixed length that two processes map for reading and writing. A forked child does not
/// have it: it is no side of the agreement.
#[derive(Debug)]
pub(crate) struct SharedPages {
    pub(crate) file: OwnedFd,
    pub(crate) memory: Reservation,
}

impl SharedPages {
    pub(crate) fn create(length_bytes: usize) -> io::Result<Self> {
        let file = sealed_file(length_bytes as u64)?;
        Self::map(file, length_bytes)
    }

    pub(crate) fn open(file: OwnedFd, length_bytes: usize) -> io::Result<Self> {
        let found_bytes = rustix::fs::fstat(&file)?.st_size as u64;
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if found_bytes != length_bytes as u64 || !seals.contains(SealFlags::SHRINK) {
            let problem = "shared memory of another length, or that is not sealed";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        Self::map(file, length_bytes)
    }

    fn map(file: OwnedFd, length_bytes: usize) -> io::Result<Self> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        let memory = Reservation::of_file(file.as_fd(), 0, length_bytes, PAGE_BYTES, access)?;
        memory.skip_on_fork()?;
        memory.refuse_huge_pages();
        Ok(Self { file, memory })
    }
}
