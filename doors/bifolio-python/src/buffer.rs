//! Memory of Python objects as slices, by the buffer protocol.
//!
//! # Safety
//! A buffer keeps its memory at its place until it is released. Its bytes may still change while
//! the GIL is released: a program that reads into memory which another thread uses at the same time
//! gets mixed bytes there, as from `io.RawIOBase.readinto`. The package passes new arrays, except
//! where its caller gives the memory (`out=`, `readinto`, the source of a write).
#![allow(unsafe_code)]

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

/// Contiguous bytes of a Python object.
#[derive(Debug)]
pub(crate) struct Bytes(PyUntypedBuffer);

impl Bytes {
    /// Returns the bytes of `object` to read from.
    pub(crate) fn to_read(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the memory of the buffer is not contiguous"));
        }
        Ok(Self(buffer))
    }

    /// Returns the bytes of `object` to write to.
    pub(crate) fn to_write(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let bytes = Self::to_read(object)?;
        if bytes.0.readonly() {
            return Err(PyBufferError::new_err("the memory of the buffer is read-only"));
        }
        Ok(bytes)
    }

    /// Returns the bytes.
    pub(crate) fn slice(&self) -> &[u8] {
        if self.0.len_bytes() == 0 {
            return &[];
        }
        let start = self.0.buf_ptr().cast_const().cast();
        // SAFETY: contiguous memory of that length, which stays at its place while `self` lives.
        // Stores of other threads are the caller's matter (head of the file).
        unsafe { std::slice::from_raw_parts(start, self.0.len_bytes()) }
    }

    /// Returns the bytes, of a buffer made by [`Self::to_write`].
    pub(crate) fn slice_mut(&mut self) -> &mut [u8] {
        assert!(!self.0.readonly(), "a buffer that is not writable");
        if self.0.len_bytes() == 0 {
            return &mut [];
        }
        let start = self.0.buf_ptr().cast();
        // SAFETY: as in `slice`; the memory is writable.
        unsafe { std::slice::from_raw_parts_mut(start, self.0.len_bytes()) }
    }
}
