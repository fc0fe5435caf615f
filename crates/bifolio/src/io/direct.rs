//! Decides for a disk file between direct transfers and the page cache.
//!
//! Called once per open by `disk.rs`. Checks everything that rules out direct I/O, in this order:
//! the caller's options, the features disabled in the cache, tmpfs, the answer of `statx`, the
//! result of `open`, and, where `statx` reported nothing, one trial read. Each reason is a readable
//! text.
//!
//! A refusal that only shows in a later transfer (EINVAL) is handled by `disk.rs`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use super::backing::{ALIGNMENT_BYTES_MAX, round_down};
use super::options::DiskOptions;
use super::{Alignment, DirectIo, IoBuffer, IoRequest};
use crate::sys::file::{self, DirectAlignment, OpenMode};
use crate::sys::probe::{Feature, Features};

/// Alignment assumed where none is reported: no device has larger logical blocks than a page.
const ALIGNMENT_GUESSED: Alignment =
    Alignment { memory_bytes: ALIGNMENT_BYTES_MAX, offset_bytes: ALIGNMENT_BYTES_MAX };

/// A descriptor opened with `O_DIRECT`, and the required alignment of its transfers.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) descriptor: OwnedFd,
    pub(super) alignment: Alignment,
}

impl Direct {
    /// Returns `true` if the transfer, or at least whole blocks at its start, can be direct.
    pub(super) fn takes(&self, request: &IoRequest) -> bool {
        request.fits(self.alignment) && self.part(request) > 0
    }

    /// Returns how many bytes of the transfer are whole blocks.
    pub(super) fn part(&self, request: &IoRequest) -> usize {
        round_down(request.length_bytes, self.alignment.offset_bytes)
    }
}

/// The decision for a file.
#[derive(Debug)]
pub(super) enum Choice {
    Direct(Direct),
    /// Buffered. `unused` is a descriptor that was opened but refused a transfer; it stays open:
    /// closing it would drop the POSIX locks that this process holds on the file.
    Buffered {
        reason: String,
        unused: Option<OwnedFd>,
    },
}

/// Returns `true` if the error means that the file system does not support direct transfers, or not
/// with these parameters.
pub(super) fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Decides for the file at `path`, already open through the page cache as `buffered`.
///
/// Fails only if the second `open` fails for a reason unrelated to direct transfers.
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

/// Returns the alignment to open with and `true` if it is certain, or the reason not to open for
/// direct transfers.
fn plan(
    buffered: BorrowedFd<'_>,
    wish: DirectIo,
    features: &Features,
) -> Result<(Alignment, bool), String> {
    if wish == DirectIo::Never {
        return Err("direct I/O was not requested".to_owned());
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

/// Decides by the answer of `statx`.
fn judge(answer: DirectAlignment) -> Result<(Alignment, bool), String> {
    match answer {
        DirectAlignment::Unknown => Ok((ALIGNMENT_GUESSED, false)),
        DirectAlignment::Unsupported => {
            Err("the file system does not support direct I/O on this file".to_owned())
        }
        DirectAlignment::Known { memory_bytes, offset_bytes } => {
            let alignment = Alignment { memory_bytes, offset_bytes };
            if alignment.is_valid() {
                return Ok((alignment, true));
            }
            Err(format!(
                "direct I/O needs alignments of {memory_bytes} bytes in memory and \
                 {offset_bytes} in the file; at most {ALIGNMENT_BYTES_MAX} is supported"
            ))
        }
    }
}

/// Checks if direct reads work. Only a refusal counts: any other error is left to the next reader,
/// which reports its position.
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
    fn a_known_alignment_is_used_and_an_unknown_one_tried() {
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
