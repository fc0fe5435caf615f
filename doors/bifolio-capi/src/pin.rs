//! Pins: access to resident bytes of a file without a copy.
//!
//! A pin lives in the caller's struct, so that taking one allocates nothing. It borrows its file;
//! `PinCount` prevents the file from being closed under it. The count is in stripes, one cache line
//! each, so that threads that pin pages of one file share no line.
//!
//! # Safety
//! Stores a [`PageRef`] of the library in words of the caller's struct, with its lifetime erased:
//! the file that it borrows is not freed while its count of pins is not zero.
#![allow(unsafe_code)]

use crate::boundary::{Failure, Output, guard, handle};
use crate::file::bifolio_file;
use crate::result::bifolio_result;
use bifolio::{GatedFile, OwnedPageRef, PageRef, PageRefMut};
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

/// Counts per file; more threads than that share one.
const STRIPES: usize = 16;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Stripe(AtomicI64);

/// Number of pins that borrow `file`.
#[derive(Debug, Default)]
pub(crate) struct PinCount {
    /// Allocated for the first pin.
    stripes: OnceLock<Box<[Stripe; STRIPES]>>,
}

impl PinCount {
    fn add(&self, count: i64) {
        let stripes = self.stripes.get_or_init(Box::default);
        // Relaxed: only the sum counts; who reads it is the only one that uses the file then.
        stripes[stripe()].0.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the sum; exact while no other thread pins.
    pub(crate) fn total(&self) -> i64 {
        let Some(stripes) = self.stripes.get() else { return 0 };
        // Relaxed: as in `add`.
        stripes.iter().map(|stripe| stripe.0.load(Ordering::Relaxed)).sum()
    }
}

/// Returns the stripe of the calling thread.
fn stripe() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static STRIPE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    let mut stripe = STRIPE.get();
    if stripe == usize::MAX {
        // Relaxed: any spread will do.
        stripe = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES;
        STRIPE.set(stripe);
    }
    stripe
}

/// Bytes of a folio that stay in memory, at `data`, until the pin is released. They are not frozen:
/// other calls may write them meanwhile, unless the file is immutable. Set the struct to zero
/// before its first use; do not copy or move it.
#[repr(C)]
#[derive(Debug)]
pub struct bifolio_pin {
    /// Address of the first byte; null if nothing is pinned.
    pub data: *const c_void,
    /// Number of pinned bytes.
    pub length: usize,
    /// Private to the library.
    pub reserved: [usize; 6],
}

/// The content of `reserved`.
enum Taken {
    Borrowed {
        file: *const bifolio_file,
        pin: PageRef<'static>,
    },
    /// Keeps the file open, and is not counted.
    Owned(#[expect(dead_code, reason = "held, and dropped")] Box<OwnedPageRef>),
}

const _: () = assert!(size_of::<Taken>() <= size_of::<[usize; 6]>());
const _: () = assert!(align_of::<Taken>() <= align_of::<usize>());

/// A pin for writing.
pub(crate) enum AnyPinMut<'a> {
    Plain(PageRefMut<'a>),
    Gated(PageRefMut<'a, GatedFile>),
}

/// Bytes of a folio, at `data`, to be changed in place: until the pin is released, no other call
/// reads or writes the folio. Set the struct to zero before its first use; do not copy it.
#[repr(C)]
#[derive(Debug)]
pub struct bifolio_write_pin {
    /// Address of the first byte; null if nothing is pinned.
    pub data: *mut c_void,
    /// Number of pinned bytes.
    pub length: usize,
    /// Private to the library.
    pub reserved: [usize; 2],
}

/// Pins `length` bytes at `offset`, which must lie in one folio (`bifolio_file_folio_bytes`) and in
/// the file. A pin of resident bytes takes no lock. Release it on the same thread, before the file
/// is closed; pinned memory counts against the bound.
///
/// Threads: any, at the same time, each with a struct of its own. Blocks: for the device, if the
/// bytes are not in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_pin(
    file: *const bifolio_file,
    offset: u64,
    length: usize,
    pin: *mut bifolio_pin,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(pin, "pin")?;
        // SAFETY: null, or a live handle.
        let open = unsafe { handle(file, "file")? };
        // SAFETY: the caller's struct, which is zero or was used before.
        check_unused(unsafe { (*pin).data })?;
        let taken = open.file().pin(offset..offset.saturating_add(length as u64))?;
        // SAFETY: `open` is freed only when its count of pins is zero, and this one is counted
        // until it is dropped.
        let taken = unsafe { std::mem::transmute::<PageRef<'_>, PageRef<'static>>(taken) };
        open.pins.add(1);
        let data = taken.as_ptr().cast();
        // SAFETY: the caller's struct.
        unsafe { output.set(holding(data, length, Taken::Borrowed { file, pin: taken })) };
        Ok(())
    })
}

/// Returns the struct of a pin.
fn holding(data: *const c_void, length: usize, taken: Taken) -> bifolio_pin {
    let mut value = bifolio_pin { data, length, reserved: [0; 6] };
    let place = value.reserved.as_mut_ptr().cast::<Taken>();
    // SAFETY: `reserved` has the size and the alignment, as the constants above check.
    unsafe { place.write(taken) };
    value
}

/// Returns the struct of a pin that keeps its file open.
pub(crate) fn holding_owned(pin: OwnedPageRef) -> bifolio_pin {
    let (data, length) = (pin.as_ptr().cast(), pin.len());
    holding(data, length, Taken::Owned(Box::new(pin)))
}

/// Releases a pin, and sets the struct to zero. Does nothing if the struct is zero or the pointer
/// null.
///
/// Threads: the one that took the pin; any, for a pin of `bifolio_file_pin_async`. Blocks: never,
/// unless such a pin is the last that keeps its file open: then for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_pin_release(pin: *mut bifolio_pin) {
    guard(|| {
        // SAFETY: null, or the caller's struct.
        let Some(pin) = (unsafe { pin.as_mut() }) else { return Ok(()) };
        if pin.data.is_null() {
            return Ok(());
        }
        // SAFETY: `data` is set together with `reserved`, by `holding`, and is cleared with it.
        let taken = unsafe { pin.reserved.as_ptr().cast::<Taken>().read() };
        *pin = bifolio_pin { data: ptr::null(), length: 0, reserved: [0; 6] };
        if let Taken::Borrowed { file, pin } = taken {
            drop(pin);
            // SAFETY: not freed yet: this pin is counted.
            unsafe { (*file).pins.add(-1) };
        }
        Ok(())
    });
}

/// Like `bifolio_file_pin`, for changing the bytes in place: the folio then is dirty, even if it
/// was not changed. Holds the folio's lock: calls of other threads that need the folio wait, and
/// one of the same thread, such as a sync, fails with `BIFOLIO_ERROR_PINNED_BY_CALLER`. If the file
/// has a write gate, the changes have the LSN of `bifolio_write_pin_assign_lsn`.
///
/// Threads: any, at the same time, each with a struct of its own. Blocks: for the device, for the
/// folio's lock, and while too much is dirty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_pin_write(
    file: *const bifolio_file,
    offset: u64,
    length: usize,
    pin: *mut bifolio_write_pin,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(pin, "pin")?;
        // SAFETY: null, or a live handle.
        let open = unsafe { handle(file, "file")? };
        // SAFETY: the caller's struct, which is zero or was used before.
        check_unused(unsafe { (*pin).data })?;
        let range = offset..offset.saturating_add(length as u64);
        let mut taken = match open.gated() {
            Some(file) => AnyPinMut::Gated(file.pin_mut(range)?),
            None => AnyPinMut::Plain(open.file().pin_mut(range)?),
        };
        let data = match &mut taken {
            AnyPinMut::Plain(pin) => pin.as_mut_ptr().cast(),
            AnyPinMut::Gated(pin) => pin.as_mut_ptr().cast(),
        };
        // SAFETY: as in `bifolio_file_pin`.
        let taken = unsafe { std::mem::transmute::<AnyPinMut<'_>, AnyPinMut<'static>>(taken) };
        open.pins.add(1);
        let boxed = Box::into_raw(Box::new(taken));
        let reserved = [boxed.expose_provenance(), file.expose_provenance()];
        // SAFETY: the caller's struct.
        unsafe { output.set(bifolio_write_pin { data, length, reserved }) };
        Ok(())
    })
}

/// Releases a pin for writing, and sets the struct to zero. Does nothing if the struct is zero or
/// the pointer null.
///
/// Threads: the one that took the pin. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_write_pin_release(pin: *mut bifolio_write_pin) {
    guard(|| {
        // SAFETY: null, or the caller's struct.
        let Some(pin) = (unsafe { pin.as_mut() }) else { return Ok(()) };
        if pin.data.is_null() {
            return Ok(());
        }
        let [taken, file] = pin.reserved;
        *pin = bifolio_write_pin { data: ptr::null_mut(), length: 0, reserved: [0; 2] };
        // SAFETY: made by `bifolio_file_pin_write`, which sets it together with `data`.
        drop(unsafe { Box::from_raw(ptr::with_exposed_provenance_mut::<AnyPinMut<'_>>(taken)) });
        let file = ptr::with_exposed_provenance::<bifolio_file>(file);
        // SAFETY: not freed yet: this pin is counted.
        unsafe { (*file).pins.add(-1) };
        Ok(())
    });
}

/// Returns the pin that a struct holds.
///
/// # Safety
/// Null, or a struct that is zero or holds a pin, which only this thread uses while the result
/// lives.
pub(crate) unsafe fn pin_mut_of<'a>(
    pin: *mut bifolio_write_pin,
) -> Result<&'a mut AnyPinMut<'static>, Failure> {
    // SAFETY: the contract.
    let pin = unsafe { handle(pin, "pin")? };
    if pin.data.is_null() {
        return Err(Failure::Misuse("pin: it is zero: nothing is pinned".to_owned()));
    }
    let taken = ptr::with_exposed_provenance_mut(pin.reserved[0]);
    // SAFETY: made by `bifolio_file_pin_write`, which sets it together with `data`; the contract.
    Ok(unsafe { &mut *taken })
}

/// Checks that a struct holds no pin, which would be lost.
pub(crate) fn check_unused<T>(data: *const T) -> Result<(), Failure> {
    if data.is_null() {
        return Ok(());
    }
    Err(Failure::Misuse("pin: it is not zero: release the pin that it holds first".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_counted_whichever_thread_took_them() {
        let count = PinCount::default();
        assert_eq!(count.total(), 0);
        std::thread::scope(|scope| {
            for _ in 0..2 * STRIPES {
                scope.spawn(|| count.add(1));
            }
        });
        assert_eq!(count.total(), 2 * STRIPES as i64);
        count.add(-3);
        assert_eq!(count.total(), 2 * STRIPES as i64 - 3);
    }
}
