//! Plots as files of their own, for the documentation.
//!
//! Called by `cargo x benchmarks`. A picture has a background and a style sheet with the colours of
//! the page, for light and for dark, in a form that viewers without CSS variables understand.

use std::fmt::Write as _;

use crate::charts::{self, Chart};
use crate::envelope::Report;
use crate::page::{escaped, kernel_dots};
use crate::plot::{self, WIDTH};

const CSS: &str = include_str!("page.css");
const MARGIN: u32 = 16;
const CAPTION_HEIGHT: u32 = 24;
/// Plots of a benchmark that its picture has, and how many are next to each other.
const PLOTS_MAX: usize = 6;
const COLUMNS: usize = 2;
/// Width of the picture with the ratios to the kernel.
const RATIOS_WIDTH: u32 = 2 * WIDTH + MARGIN;

/// Returns the name and the text of every picture: `speed-up` with the ratios to the kernel, and
/// one for each benchmark.
pub fn pictures(reports: &[Report]) -> Vec<(String, String)> {
    let label = "Speed relative to the kernel; left of 1x the kernel is faster";
    let svg = plot::ratios(&kernel_dots(reports), RATIOS_WIDTH, label);
    let chart = Chart { caption: label.to_owned(), svg };
    let mut pictures = vec![("speed-up".to_owned(), compose(&[chart], 1))];
    for report in reports {
        let charts = charts::of_rates(report);
        let charts = &charts[..charts.len().min(PLOTS_MAX)];
        if !charts.is_empty() {
            pictures.push((report.bench.to_string(), compose(charts, COLUMNS)));
        }
    }
    pictures
}

/// Places plots next to and below each other.
fn compose(charts: &[Chart], columns: usize) -> String {
    let size = |chart: &Chart, name: &str| {
        let start = format!(" {name}=\"");
        let text = chart.svg.split_once(&start).and_then(|(_, rest)| rest.split_once('"'));
        text.and_then(|(number, _)| number.parse::<u32>().ok()).unwrap_or(0)
    };
    let column_width = charts.iter().map(|chart| size(chart, "width")).max().unwrap_or(0);
    let mut y = MARGIN;
    let mut body = String::new();
    for row in charts.chunks(columns) {
        for (column, chart) in (0..).zip(row) {
            let x = MARGIN + column * (column_width + MARGIN);
            let (caption, top) = (escaped(&chart.caption), y + CAPTION_HEIGHT);
            let line = y + 12;
            let _ = writeln!(body, "<text x=\"{x}\" y=\"{line}\" class=\"t\">{caption}</text>");
            let placed = format!("<svg x=\"{x}\" y=\"{top}\" ");
            body.push_str(&chart.svg.replacen("<svg ", &placed, 1));
        }
        y += row.iter().map(|chart| size(chart, "height")).max().unwrap_or(0);
        y += CAPTION_HEIGHT + MARGIN;
    }
    let columns = columns.min(charts.len()) as u32;
    let width = columns * (column_width + MARGIN) + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{y}\" \
         viewBox=\"0 0 {width} {y}\">\n<style>\n{}</style>\n\
         <rect class=\"paper\" width=\"{width}\" height=\"{y}\" rx=\"8\"/>\n{body}</svg>\n",
        style_sheet()
    )
}

/// The style sheet of plots with the colours of `page.css` instead of its variables.
fn style_sheet() -> String {
    let mut blocks = CSS.split(":root {").skip(1).filter_map(|rest| rest.split('}').next());
    let rules = format!(
        ".paper{{fill:var(--paper)}}.t{{fill:var(--ink);font-weight:600;font-size:13px}}\n{}",
        plot::style_sheet()
    );
    let [light, dark] = [blocks.next(), blocks.next()].map(|block| {
        let pairs = block.unwrap_or_default().split(';').filter_map(|pair| pair.split_once(':'));
        pairs.fold(rules.clone(), |rules, (name, color)| {
            rules.replace(&format!("var({})", name.trim()), color.trim())
        })
    });
    format!(
        "text{{font-family:system-ui,-apple-system,\"Segoe UI\",\"DejaVu Sans\",sans-serif}}\n\
         {light}@media (prefers-color-scheme: dark){{\n{dark}}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_names_every_colour_for_light_and_for_dark() {
        let style = style_sheet();
        assert!(!style.contains("var("), "{style}");
        assert!(style.contains(".f00{fill:#0b63ce}") && style.contains(".f00{fill:#58a6ff}"));
    }

    #[test]
    fn plots_are_placed_next_to_and_below_each_other() {
        let svg = "<svg width=\"380\" height=\"100\"></svg>".to_owned();
        let chart = Chart { caption: "a<b".to_owned(), svg };
        let picture = compose(&[chart.clone(), chart.clone(), chart], 2);
        assert!(picture.contains("width=\"808\" height=\"296\""), "{picture}");
        assert_eq!(picture.matches("<svg x=\"412\" y=\"40\"").count(), 1, "{picture}");
        assert_eq!(picture.matches("<svg x=\"16\" y=\"180\"").count(), 1, "{picture}");
        assert!(!picture.contains("a<b"));
    }
}
