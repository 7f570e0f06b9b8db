// SPDX-License-Identifier: Apache-2.0
//! Tables: columns with PostgreSQL types, and rows as text cells.
//!
//! All cells of a table share one buffer, so that a table of 10,000 clients is two allocations and a worker can
//! build its part, which the console appends to the others'. Every row is checked against the columns when it is
//! written, by assertion: rows are made by this crate only.

use std::fmt::Write as _;

use crate::time::{Timestamp, Zone};

/// Type of a column, as RowDescription announces it. Values travel in text format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnType {
    /// Text, times included, as PgBouncer sends them.
    Text,
    /// `\x` and hexadecimal digits.
    Bytea,
    /// 32-bit signed; larger values are clamped to the ends of the range.
    Int4,
    /// 64-bit signed; larger values are clamped.
    Int8,
    /// Unsigned 64-bit counters.
    Numeric,
}

impl ColumnType {
    /// Object identifier of the type in `pg_type`.
    #[must_use]
    pub const fn oid(self) -> u32 {
        match self {
            Self::Bytea => 17,
            Self::Int8 => 20,
            Self::Int4 => 23,
            Self::Text => 25,
            Self::Numeric => 1700,
        }
    }

    /// `typlen` of the type: bytes, or -1 for variable length.
    #[must_use]
    pub const fn size(self) -> i16 {
        match self {
            Self::Int4 => 4,
            Self::Int8 => 8,
            Self::Bytea | Self::Text | Self::Numeric => -1,
        }
    }

    /// Name of the type in SQL.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bytea => "bytea",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Text => "text",
            Self::Numeric => "numeric",
        }
    }
}

/// A column of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// Name, as PgBouncer spells it.
    pub name: &'static str,
    /// Type.
    pub column_type: ColumnType,
    /// What it says, one sentence; the manual is made from it.
    pub help: &'static str,
}

/// Something that is one row of a table.
pub trait TableRow {
    /// Writes the cells, left to right.
    fn cells(&self, cells: &mut Cells<'_>);
}

/// Marks a NULL among the ends of cells: no buffer grows that long.
const NULL: u32 = u32::MAX;

/// A result set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    columns: &'static [Column],
    zone: Zone,
    text: String,
    /// End of each cell in `text`, or [`NULL`].
    ends: Vec<u32>,
}

impl Table {
    /// An empty table whose times are shown in UTC.
    #[must_use]
    pub fn new(columns: &'static [Column]) -> Self {
        Self::in_zone(columns, Zone::UTC)
    }

    /// An empty table whose times are shown in `zone`.
    #[must_use]
    pub const fn in_zone(columns: &'static [Column], zone: Zone) -> Self {
        Self { columns, zone, text: String::new(), ends: Vec::new() }
    }

    /// The columns.
    #[must_use]
    pub const fn columns(&self) -> &'static [Column] {
        self.columns
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len() / self.columns.len().max(1)
    }

    /// True when there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Adds a row.
    ///
    /// # Panics
    /// When the row does not fit the columns, or the text of the table passes 4 GiB: both are bugs of the caller.
    pub fn push(&mut self, row: &impl TableRow) {
        let before = self.ends.len();
        row.cells(&mut Cells { table: self, first: before });
        assert_eq!(
            self.ends.len() - before,
            self.columns.len(),
            "a row has as many cells as the table columns"
        );
    }

    /// Adds the rows of another table with the same columns, as workers hand them in.
    ///
    /// # Panics
    /// When the columns differ, or as [`Table::push`].
    pub fn append(&mut self, other: &Self) {
        assert_eq!(self.columns, other.columns, "tables of the same columns");
        let base = self.position();
        self.text.push_str(&other.text);
        // The last end passes the limit if any does.
        let _ = self.position();
        self.ends.extend(other.ends.iter().map(|&end| if end == NULL { NULL } else { end + base }));
    }

    /// Drops all rows and keeps the buffers, for a caller that encodes in portions.
    pub fn clear(&mut self) {
        self.text.clear();
        self.ends.clear();
    }

    /// The rows, each an iterator over its cells, `None` being NULL.
    pub fn rows(&self) -> impl Iterator<Item = impl Iterator<Item = Option<&str>>> {
        let mut start = 0;
        self.ends.chunks(self.columns.len().max(1)).map(move |ends| {
            let mut position = start;
            start = ends.iter().rev().find(|&&end| end != NULL).map_or(start, |&end| end as usize);
            ends.iter().map(move |&end| {
                (end != NULL).then(|| {
                    let cell = &self.text[position..end as usize];
                    position = end as usize;
                    cell
                })
            })
        })
    }

    fn position(&self) -> u32 {
        u32::try_from(self.text.len()).ok().filter(|&end| end != NULL).expect("a table below 4 GiB")
    }
}

/// Writes the cells of one row; each method takes the next column and must fit its type.
#[derive(Debug)]
pub struct Cells<'a> {
    table: &'a mut Table,
    first: usize,
}

impl Cells<'_> {
    /// A text.
    pub fn text(&mut self, value: &str) -> &mut Self {
        self.expect(ColumnType::Text);
        self.table.text.push_str(value);
        self.end()
    }

    /// A text or NULL.
    pub fn text_or_null(&mut self, value: Option<&str>) -> &mut Self {
        match value {
            Some(value) => self.text(value),
            None => {
                self.expect(ColumnType::Text);
                self.null()
            }
        }
    }

    /// Anything that prints itself, as text.
    pub fn display(&mut self, value: impl std::fmt::Display) -> &mut Self {
        self.expect(ColumnType::Text);
        self.write(value)
    }

    /// A moment, as PgBouncer shows it: `2026-11-21 20:54:41 UTC`.
    pub fn time(&mut self, value: Timestamp) -> &mut Self {
        self.expect(ColumnType::Text);
        let text = value.seconds_text(&self.table.zone);
        self.table.text.push_str(&text);
        self.end()
    }

    /// An int4, clamped.
    pub fn int4(&mut self, value: u64) -> &mut Self {
        self.expect(ColumnType::Int4);
        self.write(value.min(i32::MAX as u64))
    }

    /// An int4 that is 1 or 0.
    pub fn flag(&mut self, value: bool) -> &mut Self {
        self.int4(u64::from(value))
    }

    /// An int8, clamped.
    pub fn int8(&mut self, value: u64) -> &mut Self {
        self.expect(ColumnType::Int8);
        self.write(value.min(i64::MAX as u64))
    }

    /// An int8 from 64 bits that are no number, such as a cancel key.
    pub fn int8_bits(&mut self, value: u64) -> &mut Self {
        self.expect(ColumnType::Int8);
        self.write(value.cast_signed())
    }

    /// A numeric.
    pub fn numeric(&mut self, value: u64) -> &mut Self {
        self.expect(ColumnType::Numeric);
        self.write(value)
    }

    /// Bytes or NULL, as `\x...`.
    pub fn bytea_or_null(&mut self, value: Option<&[u8]>) -> &mut Self {
        self.expect(ColumnType::Bytea);
        let Some(value) = value else { return self.null() };
        self.table.text.push_str("\\x");
        for byte in value {
            self.push_display(format_args!("{byte:02x}"));
        }
        self.end()
    }

    fn write(&mut self, value: impl std::fmt::Display) -> &mut Self {
        self.push_display(value);
        self.end()
    }

    fn push_display(&mut self, value: impl std::fmt::Display) {
        write!(self.table.text, "{value}").expect("writing to a String");
    }

    fn end(&mut self) -> &mut Self {
        let end = self.table.position();
        self.table.ends.push(end);
        self
    }

    fn null(&mut self) -> &mut Self {
        self.table.ends.push(NULL);
        self
    }

    fn expect(&self, column_type: ColumnType) {
        let column = self.table.columns.get(self.table.ends.len() - self.first);
        assert_eq!(
            column.map(|column| column.column_type),
            Some(column_type),
            "type of the cell: {column:?}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[
        Column { name: "a", column_type: ColumnType::Text, help: "" },
        Column { name: "b", column_type: ColumnType::Int4, help: "" },
        Column { name: "c", column_type: ColumnType::Text, help: "" },
    ];

    struct Row(Option<&'static str>, u64, Option<&'static str>);

    impl TableRow for Row {
        fn cells(&self, cells: &mut Cells<'_>) {
            cells.text_or_null(self.0).int4(self.1).text_or_null(self.2);
        }
    }

    fn all(table: &Table) -> Vec<Vec<Option<String>>> {
        table.rows().map(|row| row.map(|cell| cell.map(str::to_owned)).collect()).collect()
    }

    #[test]
    fn rows_come_back_with_nulls_and_empty_texts_apart() {
        let mut table = Table::new(COLUMNS);
        assert!(table.is_empty());
        table.push(&Row(Some("x"), 7, None));
        table.push(&Row(None, u64::MAX, Some("")));
        let mut other = Table::new(COLUMNS);
        other.push(&Row(None, 0, None));
        other.push(&Row(Some("å"), 1, Some("z")));
        table.append(&other);
        assert_eq!(table.len(), 4);
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            all(&table),
            [
                vec![some("x"), some("7"), None],
                vec![None, some("2147483647"), some("")],
                vec![None, some("0"), None],
                vec![some("å"), some("1"), some("z")],
            ]
        );
        table.clear();
        assert_eq!(all(&table), Vec::<Vec<_>>::new());
    }

    #[test]
    #[should_panic(expected = "type of the cell")]
    fn a_cell_of_the_wrong_type_is_a_bug() {
        struct Wrong;
        impl TableRow for Wrong {
            fn cells(&self, cells: &mut Cells<'_>) {
                cells.int4(1);
            }
        }
        Table::new(COLUMNS).push(&Wrong);
    }

    #[test]
    #[should_panic(expected = "as many cells")]
    fn a_short_row_is_a_bug() {
        struct Short;
        impl TableRow for Short {
            fn cells(&self, cells: &mut Cells<'_>) {
                cells.text("only");
            }
        }
        Table::new(COLUMNS).push(&Short);
    }
}
