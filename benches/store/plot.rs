//! A plot of ratios, written by hand: a row for each store and kind of work, a mark for each number of
//! callers, on a logarithmic scale round the bare side.

use std::fmt::Write;

pub struct Row {
    pub store: &'static str,
    pub work: &'static str,
    /// Callers, and how many times the bare side's rate.
    pub marks: Vec<(usize, f64)>,
}

const LEFT: f64 = 170.0;
const WIDTH: f64 = 560.0;
const LINE: f64 = 20.0;
const TOP: f64 = 56.0;

/// Shapes as well as colours, for those who do not see all colours apart.
const COLOURS: [&str; 3] = ["#0072b2", "#d55e00", "#009e73"];

pub fn svg(title: &str, rows: &[Row]) -> String {
    let mut callers: Vec<usize> = rows
        .iter()
        .flat_map(|row| &row.marks)
        .map(|mark| mark.0)
        .collect();
    callers.sort_unstable();
    callers.dedup();
    let ratios = || rows.iter().flat_map(|row| &row.marks).map(|mark| mark.1);
    let least = ratios().fold(0.5, f64::min).log2().floor();
    let most = ratios().fold(2.0, f64::max).log2().ceil();
    let x = |ratio: f64| LEFT + WIDTH * (ratio.log2() - least) / (most - least);
    let height = TOP + LINE * rows.len() as f64 + 30.0;
    let width = LEFT + WIDTH + 30.0;

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>{title}</title>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"10\" y=\"18\" font-size=\"14\">{title}</text>\n"
    );
    for (n, callers) in callers.iter().enumerate() {
        let at = LEFT + 110.0 * n as f64;
        mark(&mut svg, n, at, 32.0);
        let callers_are = if *callers == 1 { "caller" } else { "callers" };
        text(
            &mut svg,
            at + 10.0,
            36.0,
            "start",
            &format!("{callers} {callers_are}"),
        );
    }
    for power in least as i32..=most as i32 {
        let ratio = 2_f64.powi(power);
        let (at, end) = (x(ratio), height - 24.0);
        let colour = if power == 0 { "#333" } else { "#ddd" };
        let _ = writeln!(
            svg,
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{end}\" stroke=\"{colour}\"/>"
        );
        text(&mut svg, at, height - 8.0, "middle", &format!("{ratio}×"));
    }
    let mut above = "";
    for (n, row) in rows.iter().enumerate() {
        let y = TOP + LINE * (n as f64 + 0.5);
        if row.store != above {
            above = row.store;
            text(&mut svg, 10.0, y + 4.0, "start", row.store);
        }
        text(&mut svg, LEFT - 10.0, y + 4.0, "end", row.work);
        for (count, ratio) in &row.marks {
            let kind = callers.iter().position(|callers| callers == count);
            mark(&mut svg, kind.unwrap_or(0), x(*ratio), y);
        }
    }
    svg + "</svg>\n"
}

fn mark(svg: &mut String, kind: usize, x: f64, y: f64) {
    let colour = COLOURS[kind % COLOURS.len()];
    let _ = match kind % 3 {
        0 => writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.5\" fill=\"{colour}\"/>"
        ),
        1 => {
            let (left, top) = (x - 4.0, y - 4.0);
            writeln!(
                svg,
                "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"8\" height=\"8\" fill=\"{colour}\"/>"
            )
        }
        _ => {
            let (left, right, top, bottom) = (x - 5.0, x + 5.0, y - 5.0, y + 4.0);
            writeln!(
                svg,
                "<polygon points=\"{left:.1},{bottom:.1} {right:.1},{bottom:.1} {x:.1},{top:.1}\" \
                 fill=\"{colour}\"/>"
            )
        }
    };
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
    );
}
