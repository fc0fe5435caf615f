//! The class `Rows`: whole rows of an array, by their numbers.
//!
//! A row is what an index of the first axis selects: contiguous bytes at an equal distance from its
//! neighbours. Most reads of programs that train or search are of rows, and small, so all that an
//! index needs happens here in one call: bounds, positions, the array of the result, the read.
//! `_index.py` has the other indices.

use bifolio::File as CacheFile;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PySlice, PyTuple};

use crate::buffer::Bytes;
use crate::file::File;
use crate::transfer::{Lengths, Ranges};

/// Most bytes that are copied with the GIL held: to give it up and get it back takes longer.
const HELD_BYTES_MAX: usize = 16 << 10;
/// Most bytes of a slice that is read here. A longer one is left to code that looks at the bound.
const SLICE_BYTES_MAX: usize = 64 << 20;

/// Where the rows of an array are in its file, and what they are in numpy.
#[derive(Debug)]
#[pyclass(frozen, module = "bifolio._core")]
pub(crate) struct Rows {
    /// Position of the first row, bytes.
    base: u64,
    /// Distance of the starts of two rows, bytes.
    stride: u64,
    /// Length of a row, bytes.
    row_bytes: usize,
    /// Shape of a row.
    shape: Py<PyTuple>,
    dtype: Py<PyAny>,
    /// `numpy.empty`.
    empty: Py<PyAny>,
}

#[pymethods]
impl Rows {
    #[new]
    fn new(
        base: u64,
        stride: u64,
        row_bytes: usize,
        shape: Py<PyTuple>,
        dtype: Py<PyAny>,
        empty: Py<PyAny>,
    ) -> Self {
        Self { base, stride, row_bytes, shape, dtype, empty }
    }

    /// Returns the row `index` of `count`.
    fn row<'py>(
        &self,
        py: Python<'py>,
        file: &Bound<'py, File>,
        index: &Bound<'py, PyAny>,
        count: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let number = index.extract::<i64>().ok().and_then(|index| in_bounds(index, count));
        let number = number.ok_or_else(|| out_of_bounds(index, count))?;
        let shape = self.shape.bind(py);
        let row = self.empty.bind(py).call1((shape, &self.dtype))?;
        self.read(py, file, Ranges::new(vec![self.position(number)], self.lengths(1)), &row)?;
        // An element is a scalar, as in numpy.
        if shape.is_empty() { row.get_item(shape) } else { Ok(row) }
    }

    /// Returns consecutive rows; `None` for a slice with a step, or a large one.
    fn consecutive<'py>(
        &self,
        py: Python<'py>,
        file: &Bound<'py, File>,
        key: &Bound<'py, PySlice>,
        count: isize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let found = key.indices(count)?;
        let is_short = found
            .slicelength
            .checked_mul(self.row_bytes)
            .is_some_and(|bytes| bytes <= SLICE_BYTES_MAX);
        if found.step != 1 || !is_short {
            return Ok(None);
        }
        let rows = self.new_array(py, &[found.slicelength])?;
        let first = found.start as u64;
        let ranges = if self.stride == self.row_bytes as u64 {
            let lengths = self.lengths(found.slicelength);
            Ranges::new(vec![self.position(first)], lengths)
        } else {
            let numbers = first..first + found.slicelength as u64;
            Ranges::new(numbers.map(|number| self.position(number)).collect(), self.lengths(1))
        };
        self.read(py, file, ranges, &rows)?;
        Ok(Some(rows))
    }

    /// Returns the rows `indices`, contiguous integers of 64 bits, in one axis or in `out`;
    /// `None` if the integers are not contiguous.
    #[pyo3(signature = (file, indices, count, out=None))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        file: &Bound<'py, File>,
        indices: &Bound<'py, PyAny>,
        count: u64,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(positions) = self.positions(indices, count)? else { return Ok(None) };
        let rows = match out {
            Some(rows) => rows,
            None => self.new_array(py, &[positions.len()])?,
        };
        self.read(py, file, Ranges::new(positions, self.lengths(1)), &rows)?;
        Ok(Some(rows))
    }

    /// Returns `length` rows from each of `starts` on, in two axes or in `out`. Both arrays of
    /// integers are contiguous.
    #[pyo3(signature = (file, starts, length, count, out=None))]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        file: &Bound<'py, File>,
        starts: &Bound<'py, PyAny>,
        length: usize,
        count: u64,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let starts = Bytes::to_read(starts)?;
        let positions = integers(&starts).map(|start| self.start(start, length as u64, count));
        let positions = positions.collect::<PyResult<Vec<_>>>()?;
        let rows = match out {
            Some(rows) => rows,
            None => self.new_array(py, &[positions.len(), length])?,
        };
        self.read(py, file, self.windows(positions, |_| length), &rows)?;
        Ok(rows)
    }

    /// Returns `lengths` rows from each of `starts` on, one after the other in one axis or in
    /// `out`, which has `total` rows. Both arrays of integers are contiguous.
    #[pyo3(signature = (file, starts, lengths, total, count, out=None))]
    #[expect(clippy::too_many_arguments, reason = "each call costs; they are positional in Python")]
    fn gather_ragged<'py>(
        &self,
        py: Python<'py>,
        file: &Bound<'py, File>,
        starts: &Bound<'py, PyAny>,
        lengths: &Bound<'py, PyAny>,
        total: usize,
        count: u64,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (starts, lengths) = (Bytes::to_read(starts)?, Bytes::to_read(lengths)?);
        let mut positions = Vec::new();
        let mut lengths_wanted = Vec::new();
        for (start, length) in integers(&starts).zip(integers(&lengths)) {
            let length = u64::try_from(length)
                .map_err(|_| PyValueError::new_err("negative lengths are not allowed"))?;
            positions.push(self.start(start, length, count)?);
            lengths_wanted.push(length as usize);
        }
        let sum = lengths_wanted.iter().try_fold(0_usize, |sum, length| sum.checked_add(*length));
        if sum != Some(total) {
            return Err(PyValueError::new_err("the lengths have changed"));
        }
        let rows = match out {
            Some(rows) => rows,
            None => self.new_array(py, &[total])?,
        };
        let ranges = self.windows(positions, |window| lengths_wanted[window]);
        self.read(py, file, ranges, &rows)?;
        Ok(rows)
    }

    /// Starts to read the rows `indices`, at most a quarter of the bound. Returns `false` if the
    /// integers are not contiguous.
    fn prefetch(
        &self,
        py: Python<'_>,
        file: &Bound<'_, File>,
        indices: &Bound<'_, PyAny>,
        count: u64,
    ) -> PyResult<bool> {
        let Some(positions) = self.positions(indices, count)? else { return Ok(false) };
        if self.row_bytes > 0 {
            let ranges = Ranges::new(positions, self.lengths(1));
            file.get().call(py, |file| ranges.prefetch(file))?;
        }
        Ok(true)
    }
}

impl Rows {
    fn position(&self, number: u64) -> u64 {
        // A position that is past every file is reported by the read.
        self.base.saturating_add(number.saturating_mul(self.stride)).min(i64::MAX as u64)
    }

    fn lengths(&self, rows: usize) -> Lengths {
        Lengths::Same(rows.saturating_mul(self.row_bytes))
    }

    /// Returns the position of `length` rows from `start` on, which counts from the end if it is
    /// negative.
    fn start(&self, start: i64, length: u64, count: u64) -> PyResult<u64> {
        let first =
            if start < 0 { count.checked_sub(start.unsigned_abs()) } else { Some(start as u64) };
        let last = first.and_then(|first| first.checked_add(length));
        match (first, last) {
            (Some(first), Some(last)) if last <= count => Ok(self.position(first)),
            _ => Err(PyIndexError::new_err(format!(
                "{length} rows from {start} on are out of bounds for axis 0 with size {count}"
            ))),
        }
    }

    /// Returns the positions of rows; `None` if the integers are not contiguous.
    fn positions(&self, indices: &Bound<'_, PyAny>, count: u64) -> PyResult<Option<Vec<u64>>> {
        let Ok(bytes) = Bytes::to_read(indices) else { return Ok(None) };
        let mut positions = Vec::with_capacity(bytes.slice().len() / size_of::<i64>());
        for index in integers(&bytes) {
            let number = in_bounds(index, count).ok_or_else(|| out_of_bounds(index, count))?;
            positions.push(self.position(number));
        }
        Ok(Some(positions))
    }

    /// Returns the ranges of windows of rows, each of as many rows as `length` says. Windows
    /// without rows are left out.
    fn windows(&self, positions: Vec<u64>, length: impl Fn(usize) -> usize) -> Ranges {
        let is_whole = self.stride == self.row_bytes as u64;
        let windows =
            positions.into_iter().enumerate().map(|(number, start)| (start, length(number)));
        let windows = windows.filter(|(_, length)| *length > 0);
        if is_whole {
            let (starts, lengths) =
                windows.map(|(start, rows)| (start, rows * self.row_bytes)).unzip();
            return Ranges::new(starts, Lengths::Each(lengths));
        }
        let stride = self.stride;
        let rows = windows.flat_map(move |(start, rows)| {
            (0..rows as u64).map(move |row| start.saturating_add(row.saturating_mul(stride)))
        });
        Ranges::new(rows.collect(), self.lengths(1))
    }

    /// Returns a new array of rows, with these axes before those of a row.
    fn new_array<'py>(&self, py: Python<'py>, axes: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let axes = PyTuple::new(py, axes)?;
        let inner = self.shape.bind(py);
        let shape = if inner.is_empty() { axes.into_any() } else { axes.add(inner)? };
        self.empty.bind(py).call1((shape, &self.dtype))
    }

    /// Reads into an array, whose bytes are those of the ranges.
    fn read<'py>(
        &self,
        py: Python<'py>,
        file: &Bound<'py, File>,
        mut ranges: Ranges,
        rows: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let file = file.get();
        let mut bytes = Bytes::to_write(rows)?;
        let mut left = bytes.slice_mut();
        if ranges.bytes() != left.len() {
            return Err(PyValueError::new_err("the array does not have the length of the rows"));
        }
        if let Some(position) = ranges.only()
            && left.len() <= HELD_BYTES_MAX
            && file.read_in_memory(left, position)?
        {
            return Ok(());
        }
        while !left.is_empty() {
            py.check_signals()?;
            let length = file.call(py, |file: &CacheFile| ranges.read(file, left))?;
            left = &mut left[length..];
        }
        Ok(())
    }
}

fn integers(bytes: &Bytes<'_>) -> impl ExactSizeIterator<Item = i64> {
    let (integers, _) = bytes.slice().as_chunks::<8>();
    integers.iter().map(|integer| i64::from_ne_bytes(*integer))
}

/// Returns the number of a row, which counts from the end if it is negative.
fn in_bounds(index: i64, count: u64) -> Option<u64> {
    if index < 0 {
        return count.checked_sub(index.unsigned_abs());
    }
    Some(index as u64).filter(|index| *index < count)
}

/// Returns the error that numpy has.
fn out_of_bounds(index: impl std::fmt::Display, count: u64) -> PyErr {
    PyIndexError::new_err(format!("index {index} is out of bounds for axis 0 with size {count}"))
}
