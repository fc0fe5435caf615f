//! The opaque copy: moving bytes out of and into frames that other threads may change meanwhile.
//!
//! An optimistic reader copies first and checks the Entry's version afterwards, so the bytes may
//! change under the copy. A plain `memcpy` that races is undefined behaviour in Rust, whatever is
//! done with the result; so frames are only ever touched by the functions of this folder: on
//! x86-64 instructions the compiler cannot see into (`x86_64.rs`), elsewhere relaxed atomic words
//! (`portable.rs`). Neither invents, drops, widens or reorders an access across the fences of the
//! protocol (`page/optimistic.rs`). What is copied may be torn: the version check decides. The copy
//! orders nothing by itself.
//!
//! # Safety
//! Each function states what the frame address that it takes must be good for.
#![allow(unsafe_code)]

// The portable twin is tested everywhere.
#[cfg(any(test, not(target_arch = "x86_64")))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub(crate) use arch::LINE_BYTES;
#[cfg(not(target_arch = "x86_64"))]
use portable as arch;
#[cfg(target_arch = "x86_64")]
use x86_64 as arch;

/// Lines of the next page that are prefetched before a copy: with 4 a scattered read is as fast,
/// with 16 it is slower (Intel, family 6, model 167).
const AHEAD_LINES_MAX: usize = 8;

/// Copies `target.len()` bytes from `source`, which others may be writing, into `target`.
///
/// # Safety
/// `source` must be readable for `target.len()` bytes for the whole call (mapped memory of a
/// frame), and must not overlap `target`. It may change during the call; it must only be changed
/// by [`copy_in`], [`zero`] or the kernel.
#[inline(always)]
pub(crate) unsafe fn copy_out(source: *const u8, target: &mut [u8]) {
    // SAFETY: the caller's contract is the same as the callee's; `target` is a unique borrow.
    unsafe { arch::copy_out(source, target.as_mut_ptr(), target.len()) }
}

/// Copies like [`copy_out`], and prefetches the next bytes to copy, at `ahead`: the processor
/// prefetches consecutive lines by itself, but not a page elsewhere, and the rest of that page once
/// its first lines are cached.
///
/// # Safety
/// As for [`copy_out`]; `ahead` can be any address.
#[inline(always)]
pub(crate) unsafe fn copy_out_ahead(source: *const u8, target: &mut [u8], ahead: *const u8) {
    // Of the bytes that follow it would cost a fifth of the rate (AMD, family 25, model 1).
    if ahead != source.wrapping_add(target.len()) {
        prefetch_lines(ahead, (target.len() / LINE_BYTES).min(AHEAD_LINES_MAX));
    }
    // SAFETY: the caller's contract.
    unsafe { copy_out(source, target) }
}

/// Returns the `N` bytes at `source`, which others may be writing: in a register for 1, 2, 4 or 8
/// bytes.
///
/// # Safety
/// As for [`copy_out`], with a target of `N` bytes.
#[inline(always)]
pub(crate) unsafe fn load<const N: usize>(source: *const u8) -> [u8; N] {
    // SAFETY: the caller's contract is the same as the callee's.
    unsafe { arch::load(source) }
}

/// Copies `source` to `target`, which others may be reading through [`copy_out`].
///
/// # Safety
/// `target` must be writable for `source.len()` bytes for the whole call and must not overlap
/// `source`. Only one thread may write those bytes at a time (the folio lock sees to it).
#[inline]
pub(crate) unsafe fn copy_in(target: *mut u8, source: &[u8]) {
    // SAFETY: the caller's contract is the same as the callee's; `source` is a shared borrow.
    unsafe { arch::copy_in(target, source.as_ptr(), source.len()) }
}

/// Fills `length_bytes` bytes at `target` with zeros, while others may be reading them.
///
/// # Safety
/// As for [`copy_in`].
#[inline]
pub(crate) unsafe fn zero(target: *mut u8, length_bytes: usize) {
    // SAFETY: the caller's contract is the same as the callee's.
    unsafe { arch::zero(target, length_bytes) }
}

/// Prefetches `lines` cache lines from `address` on; never faults, never changes anything.
#[inline(always)]
pub(crate) fn prefetch_lines(address: *const u8, lines: usize) {
    for line in 0..lines {
        arch::prefetch(address.wrapping_add(line * LINE_BYTES));
    }
}

/// Prefetches lines that are about to be written: their old bytes do not delay the stores.
#[inline]
pub(crate) fn prefetch_lines_to_write(address: *const u8, lines: usize) {
    for line in 0..lines {
        arch::prefetch_to_write(address.wrapping_add(line * LINE_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type CopyOut = unsafe fn(*const u8, *mut u8, usize);
    type CopyIn = unsafe fn(*mut u8, *const u8, usize);
    type Zero = unsafe fn(*mut u8, usize);

    const IMPLEMENTATIONS: [(CopyOut, CopyIn, Zero); 2] = [
        (arch::copy_out, arch::copy_in, arch::zero),
        (portable::copy_out, portable::copy_in, portable::zero),
    ];

    /// A frame is aligned to its page; keep a guard word on each side of what is copied.
    #[repr(align(4096))]
    struct Frame([u8; 8192]);

    fn lengths() -> impl Iterator<Item = usize> {
        (0..=300).chain([511, 512, 1000, 4095, 4096, 4097])
    }

    #[test]
    fn copies_are_exact_at_every_length_and_offset() {
        let mut frame = Frame([0; 8192]);
        for (i, byte) in frame.0.iter_mut().enumerate() {
            *byte = (i * 31 + i / 256) as u8;
        }
        for (copy_out, _, _) in IMPLEMENTATIONS {
            for length in lengths() {
                for offset in [0, 1, 7, 8, 13, 64, 100] {
                    let mut target = vec![0xAA; length + 2];
                    let inner = &mut target[1..=length];
                    // SAFETY: offset + length < 8192 bytes of `frame`; `inner` is `length` long.
                    unsafe { copy_out(frame.0[offset..].as_ptr(), inner.as_mut_ptr(), length) };
                    assert_eq!(&target[1..=length], &frame.0[offset..offset + length]);
                    assert_eq!((target[0], target[length + 1]), (0xAA, 0xAA), "length {length}");
                }
            }
        }
    }

    #[test]
    fn loads_are_exact_at_every_offset() {
        let mut frame = Frame([0; 8192]);
        for (i, byte) in frame.0.iter_mut().enumerate() {
            *byte = (i * 31 + i / 256) as u8;
        }
        fn check<const N: usize>(bytes: &[u8], offset: usize) {
            let source = bytes[offset..].as_ptr();
            // SAFETY: `offset + N` is inside of `bytes`.
            let loaded = [unsafe { arch::load::<N>(source) }, unsafe { portable::load(source) }];
            assert_eq!(loaded, [&bytes[offset..offset + N]; 2], "{N} bytes at {offset}");
        }
        for offset in 0..100 {
            check::<1>(&frame.0, offset);
            check::<2>(&frame.0, offset);
            check::<4>(&frame.0, offset);
            check::<8>(&frame.0, offset);
        }
    }

    #[test]
    fn writes_are_exact_at_every_length_and_offset() {
        let source: Vec<u8> = (0..8192).map(|i| (i * 7 + i / 256) as u8).collect();
        for (_, copy_in, zero) in IMPLEMENTATIONS {
            for length in lengths() {
                for offset in [0usize, 1, 7, 8, 13, 64, 100] {
                    let mut frame = Frame([0xAA; 8192]);
                    let at = frame.0[offset..].as_mut_ptr();
                    // SAFETY: offset + length < 8192 bytes of `frame`; `source` is 8192 long.
                    unsafe { copy_in(at, source.as_ptr(), length) };
                    assert_eq!(&frame.0[offset..offset + length], &source[..length]);
                    assert!(frame.0[..offset].iter().all(|byte| *byte == 0xAA));
                    assert!(frame.0[offset + length..].iter().all(|byte| *byte == 0xAA));
                    let at = frame.0[offset..].as_mut_ptr();
                    // SAFETY: as above.
                    unsafe { zero(at, length) };
                    assert!(frame.0[offset..offset + length].iter().all(|byte| *byte == 0));
                    assert!(frame.0[offset + length..].iter().all(|byte| *byte == 0xAA));
                }
            }
        }
    }
}
