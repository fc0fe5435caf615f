//! Memory of Python objects as slices, by the buffer protocol.
//!
//! # Safety
//! A buffer keeps its memory at its place until it is released. Its bytes may still change while
//! the GIL is released: a program that reads into memory which another thread uses at the same time
//! gets mixed bytes there, as from `io.RawIOBase.readinto`. The package passes new arrays, except
//! where its caller gives the memory (`out=`, `readinto`, the source of a write).
#![allow(unsafe_code)]

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;

/// Contiguous bytes of a Python object.
///
/// Asked for without a format, which numpy has for each dtype: those of dates, which have no
/// format, too.
pub(crate) struct Bytes<'py> {
    /// Boxed: an exporter may point into it.
    view: Box<ffi::Py_buffer>,
    /// The GIL is held where this is dropped.
    _py: Python<'py>,
}

impl<'py> Bytes<'py> {
    /// Returns the bytes of `object` to read from.
    ///
    /// # Errors
    /// It has no buffer, or one that is not contiguous.
    pub(crate) fn to_read(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_SIMPLE)
    }

    /// Returns the bytes of `object` to write to.
    ///
    /// # Errors
    /// As [`Self::to_read`]; the bytes are read-only.
    pub(crate) fn to_write(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_WRITABLE)
    }

    fn get(object: &Bound<'py, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: an object, and a view that is released only if this succeeds.
        let answer = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) };
        if answer < 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self { view, _py: object.py() })
    }

    fn len(&self) -> usize {
        usize::try_from(self.view.len).expect("a length")
    }

    /// Returns the bytes.
    pub(crate) fn slice(&self) -> &[u8] {
        if self.len() == 0 {
            return &[];
        }
        let start = self.view.buf.cast_const().cast();
        // SAFETY: contiguous memory of that length, which stays at its place while `self` lives.
        // Stores of other threads are the caller's matter (head of the file).
        unsafe { std::slice::from_raw_parts(start, self.len()) }
    }

    /// Returns the bytes, of a buffer made by [`Self::to_write`].
    pub(crate) fn slice_mut(&mut self) -> &mut [u8] {
        assert!(self.view.readonly == 0, "a buffer that is not writable");
        if self.len() == 0 {
            return &mut [];
        }
        let start = self.view.buf.cast();
        // SAFETY: as in `slice`; the memory is writable.
        unsafe { std::slice::from_raw_parts_mut(start, self.len()) }
    }
}

impl Drop for Bytes<'_> {
    fn drop(&mut self) {
        // SAFETY: a view that `get` has got, released once.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.view) }
    }
}
