//! The opaque copy on x86-64: loads and stores the compiler cannot see into.
//!
//! Small lengths: blocks of 16 bytes, the last one overlapping the one before, so that no length
//! needs a loop of bytes. (Wide registers lose there: a store that spans two lines costs more than
//! it saves.) From [`LARGE_MIN`] bytes on: the C library's `memcpy`.
//!
//! # Safety
//! Every block of our own is a single `asm!` that touches exactly the bytes named in its contract.
//!
//! `memcpy` is called from assembly: to the compiler it is as opaque as the rest, so a race with it
//! is no data race of the language. The C standard defines it only for bytes that do not change
//! meanwhile, so this relies on how it is made: machine code that loads bytes of the source, in
//! any order and perhaps twice, and stores them to the target, and acts on no value that it
//! loaded. Bytes that change make the copy a mixture, as with the loops here, and the version check
//! throws it away. Its loads come before the load of the version: x86-64 keeps loads in order,
//! whatever instructions `memcpy` uses. Its stores come before those that follow: where it stores
//! past the caches it ends with `sfence`. The thread sanitizer sees `memcpy`, but not the loops;
//! `xtask/san-thread.supp` passes over it by the name of [`copy_large`].
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_storeu_si128};

/// Bytes of a cache line.
pub(crate) const LINE_BYTES: usize = 64;

/// Minimum length, in bytes, at which the C library beats blocks of 16 bytes.
const LARGE_MIN: usize = 512;

/// # Safety
/// `source` readable and `target` writable for `length` bytes; they do not overlap.
#[inline(always)]
pub(super) unsafe fn copy_out(source: *const u8, target: *mut u8, length: usize) {
    if length >= LARGE_MIN {
        // SAFETY: the caller's contract.
        unsafe { copy_large(target, source, length) };
    } else if length >= 64 {
        let mut done = 0;
        while done + 64 <= length {
            // SAFETY: done + 64 <= length, so both sides are good for 64 bytes.
            unsafe { load_64(source.wrapping_add(done), target.wrapping_add(done)) };
            done += 64;
        }
        if done < length {
            let last = length - 64;
            // SAFETY: last + 64 == length; the overlap only repeats bytes already copied.
            unsafe { load_64(source.wrapping_add(last), target.wrapping_add(last)) };
        }
    } else {
        // SAFETY: the caller's contract.
        unsafe { copy_out_small(source, target, length) };
    }
}

/// # Safety
/// As [`copy_out`], with `length` `N`.
#[inline(always)]
pub(super) unsafe fn load<const N: usize>(source: *const u8) -> [u8; N] {
    let mut bytes = [0; N];
    let target = bytes.as_mut_ptr();
    match N {
        // SAFETY: the caller's contract; `bytes` is `N` long.
        2 => unsafe { load_2(source, target) },
        // SAFETY: as above.
        4 => unsafe { load_4(source, target) },
        // SAFETY: as above.
        8 => unsafe { load_8(source, target) },
        // SAFETY: as above.
        _ => unsafe { copy_out(source, target, N) },
    }
    bytes
}

/// # Safety
/// As [`copy_out`], with `length` below 64.
#[inline(always)]
unsafe fn copy_out_small(source: *const u8, target: *mut u8, length: usize) {
    if length >= 16 {
        let mut done = 0;
        while done + 16 < length {
            // SAFETY: done + 16 < length on both sides.
            unsafe { load_16(source.wrapping_add(done), target.wrapping_add(done)) };
            done += 16;
        }
        let last = length - 16;
        // SAFETY: last + 16 == length.
        unsafe { load_16(source.wrapping_add(last), target.wrapping_add(last)) };
    } else if length >= 8 {
        let last = length - 8;
        // SAFETY: length >= 8 on both sides.
        unsafe { load_8(source, target) };
        // SAFETY: last + 8 == length.
        unsafe { load_8(source.wrapping_add(last), target.wrapping_add(last)) };
    } else {
        for i in 0..length {
            // SAFETY: i < length on both sides.
            unsafe { load_1(source.wrapping_add(i), target.wrapping_add(i)) };
        }
    }
}

/// # Safety
/// `target` writable and `source` readable for `length` bytes; they do not overlap.
#[inline]
pub(super) unsafe fn copy_in(target: *mut u8, source: *const u8, length: usize) {
    if length >= LARGE_MIN {
        // SAFETY: the caller's contract.
        unsafe { copy_large(target, source, length) };
    } else if length >= 16 {
        let mut done = 0;
        while done + 16 < length {
            // SAFETY: done + 16 < length on both sides.
            unsafe { store_16(target.wrapping_add(done), source.wrapping_add(done)) };
            done += 16;
        }
        let last = length - 16;
        // SAFETY: last + 16 == length.
        unsafe { store_16(target.wrapping_add(last), source.wrapping_add(last)) };
    } else {
        // SAFETY: the caller's contract; the string instruction takes any length.
        unsafe { copy_string(target, source, length) };
    }
}

/// # Safety
/// `target` writable for `length` bytes.
#[inline]
pub(super) unsafe fn zero(target: *mut u8, length: usize) {
    // SAFETY: stores `length` zero bytes from `target` on; the direction flag is clear by the ABI.
    unsafe {
        asm!("rep stosb", inout("rcx") length => _, inout("rdi") target => _, in("al") 0_u8,
             options(nostack, preserves_flags));
    }
}

#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    // SAFETY: a prefetch is a hint; it neither faults nor reads in the sense of the language.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
}

#[inline(always)]
pub(super) fn prefetch_to_write(address: *const u8) {
    // SAFETY: a hint, as above; every 64-bit processor takes it, some as nothing.
    unsafe { asm!("prefetchw [{a}]", a = in(reg) address, options(nostack, preserves_flags)) };
}

/// # Safety
/// `source` readable and `target` writable for `length` bytes; they do not overlap.
#[inline(always)]
unsafe fn copy_large(target: *mut u8, source: *const u8, length: usize) {
    let copy: unsafe extern "C" fn(_, _, _) -> _ = libc::memcpy;
    // SAFETY: calls the C library's `memcpy` on the caller's ranges. What a C function may change
    // is declared; the stack is aligned, as for every block that does not say `nostack`.
    unsafe {
        asm!("call {copy}", copy = in(reg) copy, inout("rdi") target => _,
             inout("rsi") source => _, inout("rdx") length => _, clobber_abi("C"));
    }
}

/// # Safety
/// `source` readable and `target` writable for `length` bytes; they do not overlap.
#[inline(always)]
unsafe fn copy_string(target: *mut u8, source: *const u8, length: usize) {
    // SAFETY: loads `length` bytes and stores as many; the direction flag is clear by the ABI.
    unsafe {
        asm!("rep movsb", inout("rcx") length => _, inout("rdi") target => _,
             inout("rsi") source => _, options(nostack, preserves_flags));
    }
}

/// # Safety
/// `source` readable for 64 bytes (it may change meanwhile), `target` writable for 64.
#[inline(always)]
unsafe fn load_64(source: *const u8, target: *mut u8) {
    let (a, b, c, d): (__m128i, __m128i, __m128i, __m128i);
    // SAFETY: loads bytes 0..64 of `source`.
    unsafe {
        asm!("movups {a}, [{s}]", "movups {b}, [{s} + 16]",
             "movups {c}, [{s} + 32]", "movups {d}, [{s} + 48]",
             s = in(reg) source, a = out(xmm_reg) a, b = out(xmm_reg) b,
             c = out(xmm_reg) c, d = out(xmm_reg) d,
             options(nostack, preserves_flags, readonly));
    }
    for (i, block) in [a, b, c, d].into_iter().enumerate() {
        // SAFETY: bytes 16 * i .. 16 * i + 16 of the 64 writable ones.
        unsafe { _mm_storeu_si128(target.wrapping_add(16 * i).cast(), block) };
    }
}

/// # Safety
/// `source` readable for 16 bytes (it may change meanwhile), `target` writable for 16.
#[inline(always)]
unsafe fn load_16(source: *const u8, target: *mut u8) {
    let block: __m128i;
    // SAFETY: loads bytes 0..16 of `source`.
    unsafe {
        asm!("movups {b}, [{s}]", s = in(reg) source, b = out(xmm_reg) block,
             options(nostack, preserves_flags, readonly));
    }
    // SAFETY: `target` is writable for 16 bytes.
    unsafe { _mm_storeu_si128(target.cast(), block) };
}

/// # Safety
/// `source` readable for 8 bytes (it may change meanwhile), `target` writable for 8.
#[inline(always)]
unsafe fn load_8(source: *const u8, target: *mut u8) {
    let word: u64;
    // SAFETY: loads bytes 0..8 of `source`.
    unsafe {
        asm!("mov {w}, [{s}]", s = in(reg) source, w = out(reg) word,
             options(nostack, preserves_flags, readonly));
    }
    // SAFETY: `target` is writable for 8 bytes.
    unsafe { target.cast::<u64>().write_unaligned(word) };
}

/// # Safety
/// `source` readable for 4 bytes (it may change meanwhile), `target` writable for 4.
#[inline(always)]
unsafe fn load_4(source: *const u8, target: *mut u8) {
    let word: u32;
    // SAFETY: loads bytes 0..4 of `source`.
    unsafe {
        asm!("mov {w:e}, [{s}]", s = in(reg) source, w = out(reg) word,
             options(nostack, preserves_flags, readonly));
    }
    // SAFETY: `target` is writable for 4 bytes.
    unsafe { target.cast::<u32>().write_unaligned(word) };
}

/// # Safety
/// `source` readable for 2 bytes (it may change meanwhile), `target` writable for 2.
#[inline(always)]
unsafe fn load_2(source: *const u8, target: *mut u8) {
    let word: u32;
    // SAFETY: loads bytes 0..2 of `source`, and fills the register with zeros.
    unsafe {
        asm!("movzx {w:e}, word ptr [{s}]", s = in(reg) source, w = out(reg) word,
             options(nostack, preserves_flags, readonly));
    }
    // SAFETY: `target` is writable for 2 bytes.
    unsafe { target.cast::<u16>().write_unaligned(word as u16) };
}

/// # Safety
/// `source` readable for one byte (it may change meanwhile), `target` writable for one.
#[inline(always)]
unsafe fn load_1(source: *const u8, target: *mut u8) {
    let byte: u8;
    // SAFETY: loads one byte of `source`.
    unsafe {
        asm!("mov {b}, [{s}]", s = in(reg) source, b = out(reg_byte) byte,
             options(nostack, preserves_flags, readonly));
    }
    // SAFETY: `target` is writable for one byte.
    unsafe { target.write(byte) };
}

/// # Safety
/// `target` writable for 16 bytes (others may read them meanwhile), `source` readable for 16.
#[inline(always)]
unsafe fn store_16(target: *mut u8, source: *const u8) {
    // SAFETY: `source` is readable for 16 bytes.
    let block = unsafe { _mm_loadu_si128(source.cast()) };
    // SAFETY: stores bytes 0..16 of `target`.
    unsafe {
        asm!("movups [{t}], {b}", t = in(reg) target, b = in(xmm_reg) block,
             options(nostack, preserves_flags));
    }
}
