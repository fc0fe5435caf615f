//! The opaque copy on x86-64: loads and stores the compiler cannot see into.
//!
//! Small lengths: blocks of 16 bytes, the last one overlapping the one before, so that no length
//! needs a loop of bytes; a length known at compile time leaves only its own block behind. From
//! [`LARGE_MIN`] bytes on: the widest registers there are. A loop, not `rep movsb`: the processor
//! starts the next page's loads while this page's are under way, which a string instruction does
//! not let it do. (For blocks of 64 bytes wide registers lose: a store that spans two lines costs
//! more than it saves; measured, a third of the speed.) The memory side of `copy_out` is only ever
//! loaded, that of `copy_in` only stored.
//!
//! # Safety
//! Every block is a single `asm!` that touches exactly the bytes named in its contract.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_storeu_si128};

/// From this length on, wide registers beat blocks of 16 bytes.
const LARGE_MIN: usize = 512;
/// Bytes that one round of a wide loop moves.
const ROUND: usize = 256;

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

/// # Safety
/// As [`copy_string`], with `length` at least [`ROUND`].
#[inline(never)]
unsafe fn copy_large(target: *mut u8, source: *const u8, length: usize) {
    let rounds = length - length % ROUND;
    // SAFETY: the caller's contract, for the first whole rounds.
    unsafe { copy_rounds(target, source, rounds) };
    if rounds < length {
        let last = length - ROUND;
        let (target, source) = (target.wrapping_add(last), source.wrapping_add(last));
        // SAFETY: last + ROUND == length; the overlap only repeats bytes already copied.
        unsafe { copy_rounds(target, source, ROUND) };
    }
}

/// # Safety
/// As [`copy_string`], with `length` a multiple of [`ROUND`], not 0.
#[inline(always)]
unsafe fn copy_rounds(target: *mut u8, source: *const u8, length: usize) {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the caller's contract; the processor has AVX-512.
        unsafe { copy_rounds_512(target, source, length) };
    } else if is_x86_feature_detected!("avx") {
        // SAFETY: the caller's contract; the processor has AVX.
        unsafe { copy_rounds_256(target, source, length) };
    } else {
        // SAFETY: the caller's contract.
        unsafe { copy_string(target, source, length) };
    }
}

/// # Safety
/// As [`copy_string`], with `length` a multiple of [`ROUND`], not 0, and AVX-512.
#[target_feature(enable = "avx512f")]
unsafe fn copy_rounds_512(target: *mut u8, source: *const u8, length: usize) {
    // SAFETY: loads and stores bytes 0..length; the registers are declared. From 16 on they have no
    // upper half that code for SSE would have to fear.
    unsafe {
        asm!("2:",
             "vmovdqu64 zmm16, [{s}]", "vmovdqu64 zmm17, [{s} + 64]",
             "vmovdqu64 zmm18, [{s} + 128]", "vmovdqu64 zmm19, [{s} + 192]",
             "vmovdqu64 [{t}], zmm16", "vmovdqu64 [{t} + 64], zmm17",
             "vmovdqu64 [{t} + 128], zmm18", "vmovdqu64 [{t} + 192], zmm19",
             "add {s}, 256", "add {t}, 256", "sub {n}, 256", "jnz 2b",
             s = inout(reg) source => _, t = inout(reg) target => _, n = inout(reg) length => _,
             out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
             options(nostack));
    }
}

/// # Safety
/// As [`copy_string`], with `length` a multiple of [`ROUND`], not 0, and AVX.
#[target_feature(enable = "avx")]
unsafe fn copy_rounds_256(target: *mut u8, source: *const u8, length: usize) {
    // SAFETY: loads and stores bytes 0..length; the registers are declared; their upper halves are
    // cleared, as code for SSE expects.
    unsafe {
        asm!("2:",
             "vmovdqu ymm0, [{s}]", "vmovdqu ymm1, [{s} + 32]",
             "vmovdqu ymm2, [{s} + 64]", "vmovdqu ymm3, [{s} + 96]",
             "vmovdqu [{t}], ymm0", "vmovdqu [{t} + 32], ymm1",
             "vmovdqu [{t} + 64], ymm2", "vmovdqu [{t} + 96], ymm3",
             "vmovdqu ymm0, [{s} + 128]", "vmovdqu ymm1, [{s} + 160]",
             "vmovdqu ymm2, [{s} + 192]", "vmovdqu ymm3, [{s} + 224]",
             "vmovdqu [{t} + 128], ymm0", "vmovdqu [{t} + 160], ymm1",
             "vmovdqu [{t} + 192], ymm2", "vmovdqu [{t} + 224], ymm3",
             "add {s}, 256", "add {t}, 256", "sub {n}, 256", "jnz 2b",
             "vzeroupper",
             s = inout(reg) source => _, t = inout(reg) target => _, n = inout(reg) length => _,
             out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
             options(nostack));
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
