//! Maps: the bytes of a file as memory, and pins that keep a part of them resident.
//!
//! # Safety
//! Dereferences what C hands over, under the contract of the crate's head.
#![allow(unsafe_code)]

use crate::boundary::{BIFOLIO_TO_END, Failure, Output, guard, handle};
use crate::file::bifolio_file;
use crate::result::bifolio_result;
use bifolio::{Map, MapMut, MapPinMut, OwnedPageRef};
use std::ffi::c_void;
use std::ops::Range;

/// The bytes of a file as memory. It keeps the file open in the cache.
#[derive(Debug)]
pub struct bifolio_map {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Read(Map),
    Write(MapMut),
}

impl bifolio_map {
    fn map(&self) -> &Map {
        match &self.kind {
            Kind::Read(map) => map,
            Kind::Write(map) => map,
        }
    }
}

/// Bytes of a map that stay resident.
#[derive(Debug)]
pub struct bifolio_map_pin {
    _pin: AnyPin,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held, and dropped")]
enum AnyPin {
    Read(OwnedPageRef),
    Write(MapPinMut),
}

/// For `bifolio_map_new`: the bytes can be stored to.
pub const BIFOLIO_MAP_WRITE: u32 = 1;
/// For `bifolio_map_pin_new`: the kernel or a device may write the bytes while they are pinned (a
/// read with `O_DIRECT`, io_uring, RDMA). Without such a pin, bytes written in this way may be
/// lost.
pub const BIFOLIO_MAP_PIN_DEVICE_WRITES: u32 = 1;

/// Returns a range of a map, from the offset and the length of the caller.
fn range(map: &Map, offset: u64, length: u64) -> Range<u64> {
    if length == BIFOLIO_TO_END {
        return offset..map.len().max(offset);
    }
    offset..offset.saturating_add(length)
}

fn unknown_flags(flags: u32) -> Failure {
    Failure::Misuse(format!("flags: {flags:#x} has bits that stand for nothing"))
}

/// Maps `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) of a file that was opened with
/// `BIFOLIO_OPEN_MAPPABLE`, for reading, or with `BIFOLIO_MAP_WRITE` also for storing. `address`
/// gets the address of the first byte. A page that is not in memory is read when it is touched; one
/// that cannot be read raises SIGBUS, as with `mmap`, unless `bifolio_map_populate` reported it
/// first.
///
/// Threads: any, at the same time. Blocks: for write-outs of the file, with `BIFOLIO_MAP_WRITE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_map_new(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
    flags: u32,
    map: *mut *mut bifolio_map,
    address: *mut *mut c_void,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(map, "map")?;
        let address = Output::new(address, "address")?;
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let range = crate::boundary::range(file.file(), offset, length);
        let kind = match flags {
            0 => Kind::Read(file.file().map(range)?),
            BIFOLIO_MAP_WRITE => Kind::Write(file.file().map_mut(range)?),
            _ => return Err(unknown_flags(flags)),
        };
        let made = Box::new(bifolio_map { kind });
        let first = made.map().as_ptr().cast_mut().cast();
        // SAFETY: the caller's variable.
        unsafe { address.set(first) };
        // SAFETY: the caller's variable.
        unsafe { output.set(Box::into_raw(made)) };
        Ok(())
    })
}

/// Reads `length` bytes at `offset` of the map, so that touching them raises no fault until they
/// are evicted. An error is that of the first page that cannot be read.
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_map_populate(
    map: *const bifolio_map,
    offset: u64,
    length: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let map = unsafe { handle(map, "map")? }.map();
        Ok(map.populate(range(map, offset, length))?)
    })
}

/// Makes bytes stored to `length` bytes at `offset` of the map before the call durable.
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_map_sync(
    map: *const bifolio_map,
    offset: u64,
    length: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        match &unsafe { handle(map, "map")? }.kind {
            Kind::Write(map) => Ok(map.sync(range(map, offset, length))?),
            Kind::Read(_) => {
                Err(Failure::Misuse("map: it was not made with BIFOLIO_MAP_WRITE".to_owned()))
            }
        }
    })
}

/// Returns the last error of a page of the file that could not be read when it was touched, since
/// the map was created or this was last called; `BIFOLIO_OK` if there is none.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_map_take_error(map: *const bifolio_map) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let error = unsafe { handle(map, "map")? }.map().take_error();
        error.map_or(Ok(()), |error| Err(error.into()))
    })
}

/// Keeps `length` bytes at `offset` of the map resident until the pin is freed. `flags` is 0, or
/// `BIFOLIO_MAP_PIN_DEVICE_WRITES` for a map for writing. Pinned memory counts against the bound.
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_map_pin_new(
    map: *const bifolio_map,
    offset: u64,
    length: u64,
    flags: u32,
    pin: *mut *mut bifolio_map_pin,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(pin, "pin")?;
        // SAFETY: null, or a live handle.
        let map = unsafe { handle(map, "map")? };
        let range = range(map.map(), offset, length);
        let pin = match (flags, &map.kind) {
            (0, _) => AnyPin::Read(map.map().pin(range)?),
            (BIFOLIO_MAP_PIN_DEVICE_WRITES, Kind::Write(map)) => AnyPin::Write(map.pin_mut(range)?),
            (BIFOLIO_MAP_PIN_DEVICE_WRITES, Kind::Read(_)) => {
                let problem = "map: it was not made with BIFOLIO_MAP_WRITE";
                return Err(Failure::Misuse(problem.to_owned()));
            }
            _ => return Err(unknown_flags(flags)),
        };
        // SAFETY: the caller's variable.
        unsafe { output.set(Box::into_raw(Box::new(bifolio_map_pin { _pin: pin }))) };
        Ok(())
    })
}

/// Frees a pin of a map. Null is allowed.
///
/// Threads: any. Blocks: for a write pin of one of its pages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_map_pin_free(pin: *mut bifolio_map_pin) {
    if !pin.is_null() {
        guard(|| {
            // SAFETY: made by `bifolio_map_pin_new`, and no other call uses it.
            drop(unsafe { Box::from_raw(pin) });
            Ok(())
        });
    }
}

/// Frees a map: its addresses must not be touched any more. Stored bytes are kept, as dirty pages.
/// Null is allowed.
///
/// Threads: any, while no other call uses the handle. Blocks: if it is the last that keeps the file
/// open, for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_map_free(map: *mut bifolio_map) {
    if !map.is_null() {
        guard(|| {
            // SAFETY: made by `bifolio_map_new`, and no other call uses it.
            drop(unsafe { Box::from_raw(map) });
            Ok(())
        });
    }
}
