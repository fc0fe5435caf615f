//! Storage in memory: a vector behind a lock.
//!
//! The simplest backing, over which the others are tested. With an alignment, it checks that the
//! cache keeps its promises, whereas a disk file is lenient.

use std::io;
use std::ops::Range;
use std::slice;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use bifolio::backing::{
    Alignment, Backing, DirectBacking, FallocateMode, FileIdentity, IoBuf, IoBufMut,
};

/// A file that is a vector of bytes.
#[derive(Debug)]
pub struct MemoryBacking {
    bytes: RwLock<Vec<u8>>,
    alignment: Alignment,
    identity: Option<FileIdentity>,
}

impl MemoryBacking {
    /// A file that holds `bytes`.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: RwLock::new(bytes), alignment: Alignment::NONE, identity: None }
    }

    /// Sets an identity: all memories with the same identity are the same file.
    pub fn identified(self, identity: FileIdentity) -> Self {
        Self { identity: Some(identity), ..self }
    }

    /// Creates a file that holds `bytes` and refuses (EINVAL) every transfer that is not aligned as
    /// the contract of [`Backing`] requires.
    pub fn strict(bytes: Vec<u8>, alignment: Alignment) -> Self {
        Self { bytes: RwLock::new(bytes), alignment, identity: None }
    }

    /// Flips the `bits` of a byte: corruption.
    pub fn flip_bits(&self, position: u64, bits: u8) {
        self.write()[position as usize] ^= bits;
    }

    /// The bytes of the file now.
    pub fn bytes(&self) -> Vec<u8> {
        self.read().clone()
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().expect("no panic while the lock was held")
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().expect("no panic while the lock was held")
    }

    /// Returns `true` if a transfer may start in memory and file here, and has a valid length if it
    /// continues after that, or ends where it need not be whole.
    fn check(
        &self,
        address: *const u8,
        length: usize,
        position_bytes: u64,
        may_end_here: bool,
    ) -> io::Result<()> {
        let Alignment { memory_bytes, offset_bytes } = self.alignment;
        let length_fits = (length as u64).is_multiple_of(offset_bytes) || may_end_here;
        let start_fits = position_bytes.is_multiple_of(offset_bytes)
            && (address.addr() as u64).is_multiple_of(memory_bytes);
        if start_fits && length_fits {
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }
}

impl Backing for MemoryBacking {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.read_vectored_at(slice::from_mut(target), position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.write_vectored_at(slice::from_ref(source), position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.read().len() as u64)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.write().resize(length_bytes as usize, 0);
        Ok(())
    }

    fn describe(&self) -> String {
        "memory".to_owned()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for MemoryBacking {
    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        for target in targets.iter_mut() {
            // Whole blocks each, so that all begin as the first one does.
            self.check(target.as_mut_ptr(), target.len(), position_bytes, false)?;
        }
        Ok(read_vector(&self.read(), targets, position_bytes))
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let mut bytes = self.write();
        let mut position = position_bytes;
        for source in sources {
            let start = position;
            position += source.len() as u64;
            // If it does and is not the last one, the next one starts where it must not.
            let may_end_here = position >= bytes.len() as u64;
            self.check(source.as_ptr(), source.len(), start, may_end_here)?;
        }
        for (position_bytes, copy) in copies(sources, position_bytes) {
            write_vector(&mut bytes, &copy, position_bytes);
        }
        Ok((position - position_bytes) as usize)
    }

    fn fallocate(&self, mode: FallocateMode, range: Range<u64>) -> io::Result<()> {
        let mut bytes = self.write();
        let len = bytes.len();
        let [start, end] = [range.start, range.end].map(|end| len.min(end as usize));
        match mode {
            FallocateMode::Allocate => bytes.resize(len.max(range.end as usize), 0),
            FallocateMode::AllocateKeepLen => {}
            _ => bytes[start..end].fill(0),
        }
        Ok(())
    }

    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }
}

/// Fills `targets`, in order, from `bytes` at `position_bytes`.
pub(crate) fn read_vector(
    bytes: &[u8],
    targets: &mut [IoBufMut<'_>],
    position_bytes: u64,
) -> usize {
    let start = bytes.len().min(position_bytes as usize);
    let mut left = &bytes[start..];
    for target in targets {
        let (here, behind) = left.split_at(left.len().min(target.len()));
        target.copy_from_slice(0, here);
        left = behind;
    }
    bytes.len() - start - left.len()
}

/// Returns the bytes of `sources`, in order, and their position. Empty sources have no position:
/// writing nothing past the end does not move the end.
pub(crate) fn copies(
    sources: &[IoBuf<'_>],
    position_bytes: u64,
) -> impl Iterator<Item = (u64, Vec<u8>)> {
    let filled = sources.iter().filter(|source| !source.is_empty());
    filled.scan(position_bytes, |position, source| {
        let mut copy = vec![0; source.len()];
        source.copy_to_slice(0, &mut copy);
        let start = *position;
        *position += copy.len() as u64;
        Some((start, copy))
    })
}

/// Writes `new` at `position_bytes`, with zeros in the gap before it.
pub(crate) fn write_vector(bytes: &mut Vec<u8>, new: &[u8], position_bytes: u64) {
    let from = position_bytes as usize;
    let to = from + new.len();
    if to > bytes.len() {
        bytes.resize(to, 0);
    }
    bytes[from..to].copy_from_slice(new);
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio::backing::IoBuffer;

    const SECTORS: Alignment = Alignment { memory_bytes: 4, offset_bytes: 512 };

    #[test]
    fn reads_end_at_the_end_and_writes_fill_the_gap_with_zeros() {
        let backing = MemoryBacking::new(vec![1; 10]);
        let mut buffer = IoBuffer::new(8);
        assert_eq!(backing.read_at(&mut buffer.target(), 4).unwrap(), 6);
        assert_eq!(backing.read_at(&mut buffer.target(), 10).unwrap(), 0);
        assert_eq!(backing.read_at(&mut buffer.target(), 1 << 50).unwrap(), 0);
        backing.write_at(&IoBuffer::from_bytes(&[2; 3]).source(), 12).unwrap();
        assert_eq!(backing.bytes(), [&[1; 10][..], &[0; 2], &[2; 3]].concat());
        backing.set_len(3).unwrap();
        backing.set_len(5).unwrap();
        assert_eq!(backing.bytes(), [1, 1, 1, 0, 0]);
    }

    #[test]
    fn a_strict_file_refuses_only_breaches_of_the_contract() {
        let backing = MemoryBacking::strict(vec![0; 1500], SECTORS);
        let mut buffer = IoBuffer::new(2048);
        assert_eq!(backing.read_at(&mut buffer.target(), 512).unwrap(), 988);
        assert!(backing.read_at(&mut buffer.target(), 100).is_err());
        assert!(backing.read_at(&mut IoBuffer::new(100).target(), 0).is_err());
        let odd = buffer.target().as_mut_ptr().wrapping_add(2);
        assert!(backing.check(odd, 512, 0, false).is_err(), "an address");
        let source = buffer.source();
        assert!(backing.write_at(&source.prefix(100), 0).is_err(), "a hole in the middle");
        assert!(backing.write_at(&source.prefix(475), 1024).is_err(), "one byte before the end");
        assert_eq!(backing.write_at(&source.prefix(476), 1024).unwrap(), 476);
        assert_eq!(backing.write_at(&source.prefix(512), 0).unwrap(), 512);
        assert_eq!(backing.write_at(&source.prefix(1000), 1024).unwrap(), 1000);
        assert_eq!(backing.bytes().len(), 2024);
    }

    #[test]
    fn several_windows_are_one_transfer() {
        let backing = MemoryBacking::new((0..25).collect());
        let mut buffers = [IoBuffer::new(10), IoBuffer::new(0), IoBuffer::new(10)];
        let mut targets = buffers.each_mut().map(IoBuffer::target);
        assert_eq!(backing.read_vectored_at(&mut targets, 3).unwrap(), 20);
        assert_eq!(backing.read_vectored_at(&mut targets, 12).unwrap(), 13);
        assert_eq!(buffers[0].as_bytes(), (12..22).collect::<Vec<_>>());
        assert_eq!(buffers[2].as_bytes()[..4], [22, 23, 24, 16]);
        let sources = buffers.each_ref().map(IoBuffer::source);
        assert_eq!(backing.write_vectored_at(&sources, 20).unwrap(), 20);
        assert_eq!(
            backing.bytes()[18..33],
            [&[18, 19][..], &(12..25).collect::<Vec<_>>()].concat()
        );
        assert_eq!(backing.bytes().len(), 40);
    }

    #[test]
    fn a_strict_file_looks_at_every_window_before_it_moves_a_byte() {
        let backing = MemoryBacking::strict(vec![1; 4096], SECTORS);
        let buffers = [IoBuffer::new(512), IoBuffer::new(512)];
        let [first, second] = buffers.each_ref().map(IoBuffer::source);
        let write = |sources: &[IoBuf<'_>], at| backing.write_vectored_at(sources, at).is_ok();
        assert!(!write(&[first, second.prefix(100)], 0), "a part of a block inside the file");
        assert!(!write(&[first.prefix(100), second], 3584), "a part of a block, not the last");
        assert_eq!(backing.bytes(), [1; 4096]);
        assert!(write(&[first, second.prefix(100)], 3584));
        assert_eq!(backing.bytes().len(), 4196);
        assert!(write(&[first, second], 0));
        let mut buffers = [IoBuffer::new(512), IoBuffer::new(100)];
        let mut targets = buffers.each_mut().map(IoBuffer::target);
        assert!(backing.read_vectored_at(&mut targets, 0).is_err());
        assert_eq!(backing.read_vectored_at(&mut targets[..1], 4096).unwrap(), 100);
    }
}
