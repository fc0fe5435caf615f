//! Which way the transfers of a disk file go: directly to the device, or through the page cache.
//!
//! Called once per open by `disk.rs`. Everything that speaks against direct I/O is looked at here,
//! in this order: the caller's wish, the cache's mask, tmpfs, what `statx` says, what `open` says,
//! and, where `statx` knew nothing, one trial read. Each "no" is a reason a person can read.
//!
//! A refusal that only shows in a later transfer (EINVAL) is `disk.rs`'s to handle.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use super::backing::{ALIGNMENT_BYTES_MAX, round_down};
use super::options::DiskOptions;
use super::{Alignment, DirectIo, IoBuffer, IoRequest};
use crate::sys::file::{self, DirectAlignment, OpenMode};
use crate::sys::probe::{Feature, Features};

/// The assumption where nobody tells: no device has larger logical blocks than a page.
const ALIGNMENT_GUESSED: Alignment =
    Alignment { memory_bytes: ALIGNMENT_BYTES_MAX, offset_bytes: ALIGNMENT_BYTES_MAX };

/// A descriptor opened with `O_DIRECT`, and what its transfers must be multiples of.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) descriptor: OwnedFd,
    pub(super) alignment: Alignment,
}

impl Direct {
    /// Whether the transfer, or at least whole blocks at its start, can go directly.
    pub(super) fn takes(&self, request: &IoRequest) -> bool {
        request.fits(self.alignment) && self.part(request) > 0
    }

    /// How many bytes of the transfer are whole blocks.
    pub(super) fn part(&self, request: &IoRequest) -> usize {
        round_down(request.length_bytes, self.alignment.offset_bytes)
    }
}

/// The way chosen for a file.
#[derive(Debug)]
pub(super) enum Choice {
    Direct(Direct),
    /// With the descriptor that was refused later than at its opening: to close it would drop the
    /// locks that this process has on the file.
    Buffered {
        reason: String,
        unused: Option<OwnedFd>,
    },
}

/// Whether an error means that the file system does not do direct transfers, or not like this.
pub(super) fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Chooses for the file at `path`, already open through the page cache as `buffered`.
///
/// An error is one of the second `open`, that has nothing to do with direct transfers.
pub(super) fn choose(
    path: &Path,
    buffered: BorrowedFd<'_>,
    options: &DiskOptions,
    features: &Features,
) -> io::Result<Choice> {
    let (alignment, certain) = match plan(buffered, options.direct, features) {
        Ok(plan) => plan,
        Err(reason) => return Ok(Choice::Buffered { reason, unused: None }),
    };
    let mode = OpenMode { read: options.read, write: options.write, create: None, direct: true };
    let descriptor = match file::open(path, mode) {
        Ok(descriptor) => descriptor,
        Err(error) if is_refusal(&error) => {
            let reason = format!("the file system refuses O_DIRECT at open ({error})");
            return Ok(Choice::Buffered { reason, unused: None });
        }
        Err(error) => return Err(error),
    };
    if !certain
        && options.read
        && let Err(error) = try_one_read(descriptor.as_fd(), alignment)
    {
        let reason = format!("the file system refuses a direct read at open ({error})");
        return Ok(Choice::Buffered { reason, unused: Some(descriptor) });
    }
    Ok(Choice::Direct(Direct { descriptor, alignment }))
}

/// The alignment to open with and whether it is certain, or why not to open directly at all.
fn plan(
    buffered: BorrowedFd<'_>,
    wish: DirectIo,
    features: &Features,
) -> Result<(Alignment, bool), String> {
    if wish == DirectIo::Never {
        return Err("direct I/O was not asked for".to_owned());
    }
    if !features.has(Feature::DirectIo) {
        return Err("direct I/O is disabled in this cache".to_owned());
    }
    if file::is_on_tmpfs(buffered) {
        return Err("the file is on tmpfs, which is in memory".to_owned());
    }
    let answer = if features.has(Feature::StatxDirectAlignment) {
        file::direct_alignment(buffered)
    } else {
        DirectAlignment::Unknown
    };
    judge(answer)
}

/// The decision that follows from the answer of `statx`.
fn judge(answer: DirectAlignment) -> Result<(Alignment, bool), String> {
    match answer {
        DirectAlignment::Unknown => Ok((ALIGNMENT_GUESSED, false)),
        DirectAlignment::Unsupported => {
            Err("the file system says this file has no direct I/O".to_owned())
        }
        DirectAlignment::Known { memory_bytes, offset_bytes } => {
            let alignment = Alignment { memory_bytes, offset_bytes };
            if alignment.is_valid() {
                return Ok((alignment, true));
            }
            Err(format!(
                "direct I/O needs alignments of {memory_bytes} bytes in memory and \
                 {offset_bytes} in the file, where {ALIGNMENT_BYTES_MAX} is the most on offer"
            ))
        }
    }
}

/// Finds out whether direct reads work. Only a refusal counts: any other error is the next
/// reader's to see, with its position.
fn try_one_read(descriptor: BorrowedFd<'_>, alignment: Alignment) -> io::Result<()> {
    let mut scratch = IoBuffer::new(alignment.granule_bytes() as usize);
    match scratch.target().read_from(descriptor, 0) {
        Err(error) if is_refusal(&error) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(memory_bytes: u64, offset_bytes: u64) -> DirectAlignment {
        DirectAlignment::Known { memory_bytes, offset_bytes }
    }

    #[test]
    fn a_known_alignment_is_taken_an_unknown_one_is_tried() {
        let told = Alignment { memory_bytes: 4, offset_bytes: 512 };
        assert_eq!(judge(known(4, 512)), Ok((told, true)));
        assert_eq!(judge(DirectAlignment::Unknown), Ok((ALIGNMENT_GUESSED, false)));
        assert!(ALIGNMENT_GUESSED.is_valid());
    }

    #[test]
    fn alignments_beyond_a_frame_are_refused_with_the_numbers() {
        assert!(judge(DirectAlignment::Unsupported).is_err());
        let reason = judge(known(512, 65536)).unwrap_err();
        assert!(reason.contains("65536"), "{reason}");
        assert!(judge(known(512, 1000)).is_err());
    }

    #[test]
    fn only_refusals_lead_to_the_page_cache() {
        for errno in [libc::EINVAL, libc::EOPNOTSUPP] {
            assert!(is_refusal(&io::Error::from_raw_os_error(errno)));
        }
        for errno in [libc::EIO, libc::ENOSPC, libc::EACCES, libc::EINTR, libc::EBADF] {
            assert!(!is_refusal(&io::Error::from_raw_os_error(errno)));
        }
    }
}
