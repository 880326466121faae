#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "pack.h"

namespace twostep {
namespace {

constexpr int kRowBlock = 256;       // rows that share one unpacking of a panel
constexpr int kOwnedRows = 32;        // so many rows for each member: each has its own
constexpr int kPrivateValues = 4096; // fewer values than this: each member prepares its own rows, which saves a barrier
constexpr int kLargeTiles = 4;        // of query rows, for each member: with fewer, members would wait longer for the last one
constexpr int kTasksPerMember = 2;   // more would break the streams of weights, fewer wait longer for one held up

int ceil_div(int a, int b) { return (a + b - 1) / b; }

[[noreturn]] void refuse(const char* fault) { throw std::invalid_argument(fault); }

// Exactly so long, contents lost; what it held is given back first. Returns its bytes.
template <class Vector>
size_t renew(Vector& buffer, size_t size) {
  Vector().swap(buffer);
  buffer.resize(size);
  return size * sizeof(typename Vector::value_type);
}

}  // namespace

Program::Program(const Dims& dims, const std::string& isa, int threads, std::unique_ptr<KvPool> pool)
    : dims_(dims),
      kernels_(choose_kernels(isa)),
      team_owner_(std::make_shared<Team>(threads)),
      team_(*team_owner_),
      pool_(std::move(pool)),
      members_(threads),
      plans_(pool_->groups().size()) {
  for (size_t g = 0; g < plans_.size(); ++g) checks_.emplace_back(static_cast<int>(g), pool_->groups()[g]);
  for (Member& member : members_) {
    member.panels.resize(size_t(2) * kRowBlock * kPanel);
    member.unpacked.resize(kMostPanels * kScratchBytes);
    member.records.resize(4 * kPrivateValues);  // records are at most 1.5 and 2.5 bytes a value, rounded up
    member.fine_records.resize(5 * kPrivateValues);
    member.attend.resize(attend_scratch_floats(dims.head_dim));
    member.states.resize(2 * kMaxQueryRows * state_floats(dims.head_dim));
  }
}

// ---------------------------------------------------------------------------------------------------------- building

int Program::add_matrix(Format format, const uint8_t* rows, int outputs, int inputs, const std::vector<int32_t>& order) {
  const Layout layout = layout_of(format);
  Matrix matrix{format, outputs, inputs, nullptr, layout.panel_bytes(inputs)};
  uint8_t* data = weights_.take(matrix.panel_bytes * matrix.panels());
  matrix.data = data;
  const size_t row_bytes = layout.file_row_bytes(inputs);
  team_.run([&](int) {
    team_.share(matrix.panels(), [&](int p) {
      const uint8_t* sources[kPanel];
      for (int c = 0; c < kPanel; ++c) {
        const int row = p * kPanel + c;
        sources[c] = row < outputs ? rows + row_bytes * (order.empty() ? row : order[row]) : nullptr;
      }
      pack_panel(format, sources, inputs, data + size_t(p) * matrix.panel_bytes);
    });
  });
  matrices_.push_back(matrix);
  return static_cast<int>(matrices_.size()) - 1;
}

int Program::add_rotation(std::vector<float> inverse_frequencies) {
  if (inverse_frequencies.size() * 2 != size_t(dims_.head_dim)) refuse("a rotation has one frequency for each pair of a head's elements");
  rotations_.push_back(std::move(inverse_frequencies));
  return static_cast<int>(rotations_.size()) - 1;
}

void Program::set_embedding(Format format, const uint8_t* rows) {
  embed_format_ = format;
  embed_rows_ = rows;
}

void Program::add(Instruction instruction) {
  check(instruction);
  instructions_.push_back(std::move(instruction));
}

void Program::check(const Instruction& instruction) const {
  using Kind = Instruction::Kind;
  const auto norm_fits = [](const Norm& norm, int size) { return !norm || norm.weight.size() == size_t(size); };
  if (!norm_fits(instruction.norm, buffer_width(instruction.from)) || !norm_fits(instruction.post_norm, dims_.width) ||
      !norm_fits(instruction.q_norm, dims_.head_dim) || !norm_fits(instruction.k_norm, dims_.head_dim))
    refuse("a norm has another size than the rows it normalises");
  switch (instruction.kind) {
    case Kind::Embed:
      if (!embed_rows_) refuse("the program has no embedding");
      break;
    case Kind::Attention: {
      const auto& groups = pool_->groups();
      if (instruction.group < 0 || instruction.group >= static_cast<int>(groups.size()) || instruction.layer < 0 ||
          instruction.layer >= groups[instruction.group].layers)
        refuse("attention has a group or layer that the KV pool lacks");
      if (instruction.rotation < -1 || instruction.rotation >= static_cast<int>(rotations_.size())) refuse("attention has a rotation that the program lacks");
      break;
    }
    default: check_pieces(instruction);
  }
}

// Columns of a matrix have to be those of `from`, its outputs to fit `to`; the buffers that the kernels write in place are fixed.
void Program::check_pieces(const Instruction& instruction) const {
  using Kind = Instruction::Kind;
  const Kind kind = instruction.kind;
  const size_t most = kind == Kind::Gated ? 2 : kind == Kind::Linear ? SIZE_MAX : 1, least = kind == Kind::Gated ? 2 : 1;
  if (instruction.pieces.size() < least || instruction.pieces.size() > most) refuse("an instruction has another number of matrices");
  const int room = kind == Kind::Logits ? dims_.vocab : buffer_width(instruction.to);
  const bool floats = !layout_of(matrices_.at(instruction.pieces[0].matrix).format).quantised();
  int columns = 0;
  for (const Piece& piece : instruction.pieces) {
    const Matrix& matrix = matrices_.at(piece.matrix);
    if (matrix.inputs != buffer_width(instruction.from)) refuse("a matrix has other inputs than its buffer has columns");
    const bool whole = kind == Kind::Linear || (piece.offset == 0 && matrix.outputs == room);
    if (piece.offset < 0 || piece.offset + matrix.outputs > room || !whole) refuse("a matrix has other outputs than its buffer has columns");
    if (!piece.bias.empty() && (piece.bias.size() != size_t(matrix.outputs) || kind == Kind::Gated || kind == Kind::Logits))
      refuse("a bias has another size than its matrix has outputs, or none is possible");
    if (floats == layout_of(matrix.format).quantised()) refuse("matrices that share an input must all be quantised or all be floats");
    columns += matrix.outputs;
  }
  if (kind == Kind::Linear && columns != room) refuse("the matrices do not fill the columns of their buffer");
}

// ----------------------------------------------------------------------------------------------------------- running

void Program::reserve(int rows) {
  const Team::Turn turn(team_);
  grow(rows);
}

// spec/memory.py states the same sizes in advance; a test compares them.
void Program::grow(int rows) {
  if (rows <= capacity_) return;
  capacity_ = 0;  // until all is there: an allocation that fails must not count
  const size_t n = rows;
  buffer_bytes_ = renew(residual_, n * dims_.width) + renew(qkv_, n * dims_.qkv_width()) + renew(heads_, n * dims_.query_width()) +
                  renew(ffn_, n * dims_.ffn_width) + renew(normed_, n * dims_.width) + renew(angles_, n * dims_.head_dim * rotations_.size()) +
                  renew(records_, n * QuantRows::record_bytes(widest(), false)) +
                  renew(fine_records_, n * QuantRows::record_bytes(widest(), true)) + renew(row_slice_, n) + renew(row_position_, n);
  capacity_ = rows;
}

void Program::copy_block(int group, int source, int target) {
  const Team::Turn turn(team_);
  pool_->copy(group, source, target);
}

void Program::export_block(int group, int block, uint8_t* out) {
  const Team::Turn turn(team_);
  pool_->export_block(group, block, out);
}

void Program::import_block(int group, int block, const uint8_t* data, size_t size) {
  const Team::Turn turn(team_);
  pool_->import_block(group, block, data, size);
}

bool Program::forward(const Batch& batch, float* out) {
  const Team::Turn turn(team_);
  for (BlockCheck& check : checks_) check.check(batch);
  if (batch.rows == 0) return true;
  grow(batch.rows);
  place_rows(batch);
  for (size_t g = 0; g < plans_.size(); ++g) plan_attention(batch, static_cast<int>(g));
  stopped_ = false;
  cancel_.store(false, std::memory_order_relaxed);
  seconds_.fill(0);
  mark_ = std::chrono::steady_clock::now();
  profile_.begin_step();
  team_.run([&](int member) { run(batch, out, member); });
  return !stopped_;
}

void Program::run(const Batch& batch, float* out, int member) {
  profile_.wait(member, static_cast<int>(instructions_.size()), Stage::Prepare);
  for (size_t i = 0; i < instructions_.size(); ++i) {
    members_[member].instruction = static_cast<int>(i);
    if (!execute(instructions_[i], batch, out, member)) return;
  }
}

void Program::profile_steps(bool on) {
  const Team::Turn turn(team_);
  if (on) profile_.start(team_.size(), static_cast<int>(instructions_.size()));
  else profile_.stop();
}

bool Program::execute(const Instruction& instruction, const Batch& batch, float* out, int member) {
  using Kind = Instruction::Kind;
  switch (instruction.kind) {
    case Kind::Embed: run_embed(instruction, batch, member); break;
    case Kind::Linear: run_linear(instruction, batch, member); break;
    case Kind::Attention: return run_attention(instruction, batch, member);
    case Kind::LinearAdd: run_linear_add(instruction, batch, member); break;
    case Kind::Gated: run_gated(instruction, batch, member); break;
    case Kind::Logits: run_logits(instruction, batch, out, member); break;
  }
  return true;
}

// Member 0 decides before the barrier and all read the decision right after it, so that nobody waits for one that left.
bool Program::pass(Stage stage, int member) {
  if (member == 0) stopped_ = cancel_.load(std::memory_order_relaxed);
  meet(stage, member);
  return !stopped_;
}

void Program::meet(Stage stage, int member) {
  did(stage, member);
  team_.barrier();
  profile_.wait(member, members_[member].instruction, stage);
}

void Program::lap(Part part, int member) {
  if (member != 0) return;
  const auto now = std::chrono::steady_clock::now();
  seconds_[static_cast<int>(part)] += std::chrono::duration<double>(now - mark_).count();
  mark_ = now;
}

float* Program::buffer(Buffer which) const {
  switch (which) {
    case Buffer::Residual: return const_cast<float*>(residual_.data());
    case Buffer::Qkv: return const_cast<float*>(qkv_.data());
    case Buffer::Heads: return const_cast<float*>(heads_.data());
    default: return const_cast<float*>(ffn_.data());
  }
}

int Program::buffer_width(Buffer which) const {
  switch (which) {
    case Buffer::Residual: return dims_.width;
    case Buffer::Qkv: return dims_.qkv_width();
    case Buffer::Heads: return dims_.query_width();
    default: return dims_.ffn_width;
  }
}

// Rows of the embedding, and the cosines and sines of each row's position (in float32, as the models were trained), for
// each rotation of the network.
void Program::run_embed(const Instruction& instruction, const Batch& batch, int member) {
  const size_t row_bytes = layout_of(embed_format_).file_row_bytes(dims_.width);
  const int half = dims_.head_dim / 2;
  team_.share(batch.rows, [&](int row) {
    float* x = &residual_[size_t(row) * dims_.width];
    decode_row(embed_format_, embed_rows_ + row_bytes * batch.tokens[row], dims_.width, x);
    if (instruction.scale != 1.0f)
      for (int i = 0; i < dims_.width; ++i) x[i] *= instruction.scale;
    const float position = static_cast<float>(row_position_[row]);
    for (size_t r = 0; r < rotations_.size(); ++r) {
      float* angles = &angles_[(size_t(row) * rotations_.size() + r) * dims_.head_dim];
      for (int i = 0; i < half; ++i) {
        angles[i] = std::cos(position * rotations_[r][i]);
        angles[half + i] = std::sin(position * rotations_[r][i]);
      }
    }
  });
  meet(Stage::Prepare, member);
  lap(Part::Rest, member);
}

// ------------------------------------------------------------------------------------------------------------ linear

bool Program::owned(const Batch& batch) const { return batch.rows >= kOwnedRows * team_.active(); }

int Program::first_owned(const Batch& batch, int member) const {
  return static_cast<int>(int64_t(batch.rows) * member / team_.active());
}

// What an instruction wrote may be read, by any member if rows have no owner.
void Program::end_rows(const Batch& batch, Stage stage, int member) {
  if (owned(batch)) did(stage, member);
  else meet(stage, member);
}

int Program::widest() const { return std::max({dims_.width, dims_.query_width(), dims_.ffn_width}); }

// `own`: in the member's own memory. Else records of rows from `first` on begin where they would if all were of the widest
// instruction: owners of rows may be at different instructions, and must not write to records that others still read.
Program::Input Program::input_of(const Instruction& instruction, bool own, int first, Member& mine) {
  const int inputs = matrices_[instruction.pieces[0].matrix].inputs;
  const bool norm = bool(instruction.norm);
  const auto stride = [&](bool fine) { return QuantRows::record_bytes(inputs, fine); };
  const auto skip = [&](bool fine) { return first * (QuantRows::record_bytes(widest(), fine) - stride(fine)); };
  return {{own ? mine.records.data() : records_.data() + skip(false), stride(false), inputs, false},
          {own ? mine.fine_records.data() : fine_records_.data() + skip(true), stride(true), inputs, true},
          norm ? normed_.data() : buffer(instruction.from), norm ? size_t(inputs) : size_t(buffer_width(instruction.from))};
}

// Norms and quantises one row of an instruction's input.
void Program::prepare_row(const Instruction& instruction, const Input& in, bool own, int row, int source_row, Member& mine) {
  const float* x = buffer(instruction.from) + size_t(buffer_width(instruction.from)) * source_row;
  const int inputs = in.coarse.inputs;
  if (instruction.norm) {
    float* normed = own ? mine.panels.data() : &normed_[size_t(row) * inputs];  // panels: free until the first panel
    kernels_.rms_norm(x, instruction.norm.weight.data(), instruction.norm.eps, inputs, normed);
    x = normed;
  }
  if (layout_of(matrices_[instruction.pieces[0].matrix].format).quantised()) quantise_row(instruction, x, in, row);
}

// All rows of the step, or those that the member owns.
Program::Input Program::prepare(const Instruction& instruction, const Batch& batch, int member) {
  Member& mine = members_[member];
  if (owned(batch)) {
    const int first = first_owned(batch, member);
    const Input in = input_of(instruction, false, first, mine);
    for (int r = first; r < first_owned(batch, member + 1); ++r) prepare_row(instruction, in, false, r, r, mine);
    did(Stage::Prepare, member);
    lap(Part::Rest, member);
    return in;
  }
  return prepare_shared(instruction, batch.rows, nullptr, member);
}

// Rows that have no owner, or were chosen from all. `chosen_rows` null: all rows in order.
Program::Input Program::prepare_shared(const Instruction& instruction, int rows, const int32_t* chosen_rows, int member) {
  Member& mine = members_[member];
  const Matrix& matrix = matrices_[instruction.pieces[0].matrix];
  const bool floats = !layout_of(matrix.format).quantised(), norm = bool(instruction.norm);
  const bool own = !floats && size_t(rows) * matrix.inputs <= kPrivateValues;
  const Input in = input_of(instruction, own, 0, mine);
  const auto one = [&](int r) { prepare_row(instruction, in, own, r, chosen_rows ? chosen_rows[r] : r, mine); };
  if (own) {
    for (int r = 0; r < rows; ++r) one(r);
    did(Stage::Prepare, member);
  } else if (!floats || norm) {
    team_.share(rows, one);
    meet(Stage::Prepare, member);
  }
  lap(Part::Rest, member);
  return in;
}

void Program::quantise_row(const Instruction& instruction, const float* x, const Input& in, int row) const {
  bool coarse = false, fine = false;
  for (const Piece& piece : instruction.pieces) (piece.fine ? fine : coarse) = true;
  uint8_t* record = const_cast<uint8_t*>(in.coarse.base) + in.coarse.stride * row;
  uint8_t* fine_record = const_cast<uint8_t*>(in.fine.base) + in.fine.stride * row;
  kernels_.quantise(x, in.coarse.inputs, coarse ? record : nullptr, fine ? fine_record : nullptr);
}

// One panel, or two of one format and precision, with rows `row`.. of the prepared ones.
void Program::panels(const PanelOf* which, int count, const Input& in, int row, int rows, Member& mine) const {
  const Piece& piece = *which[0].piece;
  const Format format = matrices_[piece.matrix].format;
  if (!layout_of(format).quantised()) {
    for (int i = 0; i < count; ++i)
      kernels_.float_panel(matrices_[which[i].piece->matrix], which[i].panel, in.floats + in.float_stride * row, in.float_stride, rows, which[i].out);
    return;
  }
  PanelJob jobs[kMostPanels];
  for (int i = 0; i < count; ++i) {
    const Matrix& matrix = matrices_[which[i].piece->matrix];
    jobs[i] = {matrix.panel(which[i].panel), matrix.panel(which[i].next), which[i].out};
  }
  QuantRows x = piece.fine ? in.fine : in.coarse;
  x.base += x.stride * row;
  kernels_.linear_panels(format, jobs, count, x, rows, mine.unpacked.data());
}

// `count` panels of a piece from `panel` on, into the member's two buffers.
void Program::consecutive_panels(const Piece& piece, int panel, int count, const Input& in, int row, int rows, Member& mine) const {
  PanelOf which[kMostPanels];
  for (int i = 0; i < count; ++i) which[i] = {&piece, panel + i, panel + count + i, mine.panel(i)};
  panels(which, count, in, row, rows, mine);
}

int Program::panels_of(const std::vector<Piece>& pieces, size_t count) const {
  int panels = 0;
  for (size_t i = 0; i < count; ++i) panels += matrices_[pieces[i].matrix].panels();
  return panels;
}

// Panels begin..end-1 of the pieces, counted through, one or two at a time: store(piece, panel, panels, first row, rows)
// computes and stores.
template <class Store>
void Program::multiply_some(const std::vector<Piece>& pieces, int begin, int end, int row, int rows, Store&& store) {
  int first = 0;
  for (size_t i = 0; begin < end; ++i) {
    const int next = first + matrices_[pieces[i].matrix].panels();
    for (int taken; begin < std::min(end, next); begin += taken) {
      taken = std::min(kMostPanels, std::min(end, next) - begin);
      store(pieces[i], begin - first, taken, row, rows);
    }
    first = next;
  }
}

// Shares out the panels of the first `count` pieces for all rows.
template <class Store>
void Program::multiply_shared(const std::vector<Piece>& pieces, size_t count, int rows, Store&& store) {
  const int panels = panels_of(pieces, count), row_blocks = ceil_div(rows, kRowBlock);
  const int share = std::max(1, panels * row_blocks / (kTasksPerMember * team_.size()));
  const int chunk = share > kMostPanels ? share / kMostPanels * kMostPanels : share, chunks = ceil_div(panels, chunk);
  team_.share(chunks * row_blocks, [&](int task) {
    const int row = task / chunks * kRowBlock, begin = task % chunks * chunk;
    multiply_some(pieces, begin, std::min(panels, begin + chunk), row, std::min(kRowBlock, rows - row), store);
  });
}

// The first `count` pieces with all rows of the step, or with those that the member owns.
template <class Store>
void Program::multiply(const std::vector<Piece>& pieces, size_t count, const Batch& batch, int member, Store&& store) {
  if (!owned(batch)) return multiply_shared(pieces, count, batch.rows, store);
  const int panels = panels_of(pieces, count), end = first_owned(batch, member + 1);
  for (int row = first_owned(batch, member); row < end; row += kRowBlock)
    multiply_some(pieces, 0, panels, row, std::min(kRowBlock, end - row), store);
}

// Pieces of one instruction may differ in format, but all are quantised or none: the caller sees to it.
void Program::run_linear(const Instruction& instruction, const Batch& batch, int member) {
  const Input in = prepare(instruction, batch, member);
  const size_t stride = buffer_width(instruction.to);
  float* out = buffer(instruction.to);
  Member& mine = members_[member];
  multiply(instruction.pieces, instruction.pieces.size(), batch, member, [&](const Piece& piece, int p, int count, int row, int rows) {
    consecutive_panels(piece, p, count, in, row, rows, mine);
    for (int i = 0; i < count; ++i) {
      const int column = (p + i) * kPanel, width = std::min(kPanel, matrices_[piece.matrix].outputs - column);
      const float* bias = piece.bias.empty() ? nullptr : piece.bias.data() + column;
      kernels_.put(mine.panel(i), rows, width, bias, out + row * stride + piece.offset + column, stride);
    }
  });
  end_rows(batch, Stage::Compute, member);
  lap(Part::Linear, member);
}

void Program::run_linear_add(const Instruction& instruction, const Batch& batch, int member) {
  const Input in = prepare(instruction, batch, member);
  const size_t stride = dims_.width;
  Member& mine = members_[member];
  multiply(instruction.pieces, 1, batch, member, [&](const Piece& piece, int p, int count, int row, int rows) {
    consecutive_panels(piece, p, count, in, row, rows, mine);
    for (int i = 0; i < count; ++i) {
      const int column = (p + i) * kPanel, width = std::min(kPanel, matrices_[piece.matrix].outputs - column);
      float* tile = mine.panel(i);
      const float* bias = piece.bias.empty() ? nullptr : piece.bias.data() + column;
      if (instruction.post_norm) {
        kernels_.put(tile, rows, width, bias, normed_.data() + row * stride + column, stride);
        continue;
      }
      if (bias) kernels_.put(tile, rows, width, bias, tile, kPanel);
      kernels_.add(tile, rows, width, residual_.data() + row * stride + column, stride);
    }
  });
  end_rows(batch, Stage::Compute, member);
  lap(Part::Linear, member);
  if (!instruction.post_norm) return;
  add_normed(instruction, batch, member);
  end_rows(batch, Stage::Finish, member);
  lap(Part::Rest, member);
}

// The projection's rows lie in `normed_`, which no instruction reads that has no norm of its input.
void Program::add_normed(const Instruction& instruction, const Batch& batch, int member) {
  const auto one = [&](int row) {
    float *normed = &normed_[size_t(row) * dims_.width], *residual = &residual_[size_t(row) * dims_.width];
    kernels_.rms_norm(normed, instruction.post_norm.weight.data(), instruction.post_norm.eps, dims_.width, normed);
    for (int i = 0; i < dims_.width; ++i) residual[i] += normed[i];
  };
  if (!owned(batch)) return team_.share(batch.rows, one);
  for (int row = first_owned(batch, member); row < first_owned(batch, member + 1); ++row) one(row);
}

// Panel p of both, into the member's two buffers; together where one tile can hold both.
void Program::gate_and_up(const Piece& gate, const Piece& up, int p, const Input& in, int row, int rows, Member& mine) const {
  const PanelOf which[] = {{&gate, p, p + 1, mine.panel(0)}, {&up, p, p + 1, mine.panel(1)}};
  const bool alike = matrices_[gate.matrix].format == matrices_[up.matrix].format && gate.fine == up.fine;
  if (alike) return panels(which, 2, in, row, rows, mine);
  for (const PanelOf& one : which) panels(&one, 1, in, row, rows, mine);
}

void Program::run_gated(const Instruction& instruction, const Batch& batch, int member) {
  const Input in = prepare(instruction, batch, member);
  const size_t stride = dims_.ffn_width;
  Member& mine = members_[member];
  multiply(instruction.pieces, 1, batch, member, [&](const Piece& gate, int p, int count, int row, int rows) {
    for (int i = p; i < p + count; ++i) {
      gate_and_up(gate, instruction.pieces[1], i, in, row, rows, mine);
      const int column = i * kPanel, width = std::min(kPanel, matrices_[gate.matrix].outputs - column);
      kernels_.gated(instruction.activation, mine.panel(0), mine.panel(1), rows, width, ffn_.data() + row * stride + column, stride);
    }
  });
  end_rows(batch, Stage::Compute, member);
  lap(Part::Linear, member);
}

void Program::run_logits(const Instruction& instruction, const Batch& batch, float* out, int member) {
  if (batch.logit_count == 0) return;
  if (owned(batch)) meet(Stage::Prepare, member);  // its rows are anybody's
  const Input in = prepare_shared(instruction, batch.logit_count, batch.logit_rows, member);
  const size_t stride = dims_.vocab;
  Member& mine = members_[member];
  multiply_shared(instruction.pieces, 1, batch.logit_count, [&](const Piece& piece, int p, int count, int row, int rows) {
    consecutive_panels(piece, p, count, in, row, rows, mine);
    for (int i = 0; i < count; ++i) {
      const int column = (p + i) * kPanel, width = std::min(kPanel, matrices_[piece.matrix].outputs - column);
      kernels_.put(mine.panel(i), rows, width, nullptr, out + row * stride + column, stride);
    }
  });
  meet(Stage::Compute, member);
  lap(Part::Head, member);
}

// --------------------------------------------------------------------------------------------------------- attention

KvView Program::view(const Instruction& instruction, const Batch& batch, int slice, int kv_head) const {
  const int group = instruction.group;
  return {pool_->block(group, instruction.layer, 0) + kv_head * pool_->head_elements(), pool_->block_stride(group),
          batch.tables[group] + batch.table_starts[slice], dims_.head_dim, pool_->groups()[group].first_seen_block(batch.starts[slice])};
}

void Program::place_rows(const Batch& batch) {
  for (int s = 0, row = 0; s < batch.slices; row += batch.counts[s], ++s)
    for (int i = 0; i < batch.counts[s]; ++i) {
      row_slice_[row + i] = s;
      row_position_[row + i] = batch.starts[s] + i;
    }
}

// Cuts the step's rows into tasks of one KV head and at most kMaxQueryRows query rows. Where that gives too few for the
// team (a lone decode), a task is one split of the positions, joined afterwards in order, or else one query head:
// neither changes the arithmetic of a row.
void Program::plan_attention(const Batch& batch, int group) {
  int tiles = 0, splits = 1;
  const int window = pool_->groups()[group].window;
  const bool large = int64_t(batch.rows) * dims_.heads >= int64_t(kLargeTiles) * team_.size() * kMaxQueryRows;
  const int tile_tokens = std::max(1, kMaxQueryRows / (large ? 1 : 2) / dims_.group());
  for (int s = 0; s < batch.slices; ++s) {
    tiles += ceil_div(batch.counts[s], tile_tokens);
    splits = std::max(splits, ceil_div(batch.starts[s] + batch.counts[s], kSplit) - first_seen_position(batch.starts[s], window) / kSplit);
  }
  AttentionPlan& plan = plans_[group];
  const bool few = tiles * dims_.kv_heads < 2 * team_.size();
  plan.joins = few && splits > 1;
  plan.tile_tokens = tile_tokens;
  plan.tasks.clear();
  for (int s = 0, row = 0; s < batch.slices; row += batch.counts[s], ++s) add_query_tasks(batch, group, s, row, few && !plan.joins);
  std::reverse(plan.tasks.begin(), plan.tasks.end());  // the longest first
  const size_t floats = plan.tasks.size() * kMaxQueryRows * state_floats(dims_.head_dim);
  if (plan.joins && states_.size() < floats) states_.resize(floats);
}

void Program::add_query_tasks(const Batch& batch, int group_number, int slice, int first_row, bool by_head) {
  AttentionPlan& plan = plans_[group_number];
  const int group = dims_.group(), tile_tokens = plan.tile_tokens, heads = by_head || group > kMaxQueryRows ? 1 : group;
  for (int token = 0; token < batch.counts[slice]; token += tile_tokens) {
    const int tokens = std::min(tile_tokens, batch.counts[slice] - token), position = batch.starts[slice] + token;
    const int first = first_seen_position(position, pool_->groups()[group_number].window) / kSplit;
    const int splits = ceil_div(position + tokens, kSplit) - first, parts = plan.joins ? splits : 1;
    for (int head = 0; head < dims_.heads; head += heads)
      for (int part = 0; part < parts; ++part) {
        const int state = static_cast<int>(plan.tasks.size());
        plan.tasks.push_back({slice, first_row + token, tokens, position, head / group, head, heads, first + part, splits / parts, state, part ? 0 : parts});
      }
  }
}

// One head of q or k of a row, in place: normalised, rotated, times `factor`.
void Program::turn_head(const Instruction& instruction, const Norm& norm, float* head, int row, float factor) const {
  const int d = dims_.head_dim;
  if (norm) kernels_.rms_norm(head, norm.weight.data(), norm.eps, d, head);
  if (instruction.rotation >= 0) return kernels_.rope(head, &angles_[(size_t(row) * rotations_.size() + instruction.rotation) * d], d, factor);
  for (int i = 0; i < d; ++i) head[i] *= factor;
}

void Program::rotate_and_store(const Instruction& instruction, const Batch& batch, int row) {
  const int d = dims_.head_dim, position = row_position_[row], block = position / kBlock;
  float* q = &qkv_[size_t(row) * dims_.qkv_width()];
  float *k = q + dims_.query_width(), *v = k + dims_.kv_heads * d;
  for (int h = 0; h < dims_.heads; ++h) turn_head(instruction, instruction.q_norm, q + h * d, row, instruction.scale * kLog2E);
  for (int h = 0; h < dims_.kv_heads; ++h) {
    turn_head(instruction, instruction.k_norm, k + h * d, row, 1.0f);
    const KvView kv = view(instruction, batch, row_slice_[row], h);
    kernels_.write_kv(k + h * d, v + h * d, d, position % kBlock, const_cast<uint16_t*>(kv.keys(block)), const_cast<uint16_t*>(kv.values(block)));
  }
}

void Program::finish_heads(const QueryTask& task, const float* states) {
  const size_t stride = state_floats(dims_.head_dim);
  for (int t = 0; t < task.tokens; ++t)
    for (int h = 0; h < task.heads; ++h) {
      float* out = &heads_[size_t(task.first_row + t) * dims_.query_width() + (task.head + h) * dims_.head_dim];
      kernels_.finish(states + (t * task.heads + h) * stride, dims_.head_dim, out);
    }
}

// Blocks of a task from a split on.
KvAfter Program::blocks_from(const QueryTask& task, const KvView& kv, int split) const {
  const int last = (task.position + task.tokens - 1) / kBlock;
  return {&kv, std::max(kv.first_block, split * (kSplit / kBlock)), std::min(last + 1, (task.first_split + task.splits) * (kSplit / kBlock))};
}

// `next`: the task that the member will probably have after this one; null: none.
void Program::attend(const Instruction& instruction, const QueryTask& task, const QueryTask* next_task, const Batch& batch, int member) {
  const int d = dims_.head_dim, rows = task.tokens * task.heads;
  const bool joins = plans_[instruction.group].joins;
  const size_t stride = state_floats(d);
  const QueryTile tile{&qkv_[size_t(task.first_row) * dims_.qkv_width() + task.head * d], static_cast<size_t>(dims_.qkv_width()),
                       static_cast<size_t>(d), task.tokens, task.heads, task.position, pool_->groups()[instruction.group].window};
  const KvView kv = view(instruction, batch, task.slice, task.kv_head);
  Member& mine = members_[member];
  float *states = joins ? &states_[task.state * kMaxQueryRows * stride] : mine.states.data();
  float* next = mine.states.data() + kMaxQueryRows * stride;
  const KvView next_kv = next_task ? view(instruction, batch, next_task->slice, next_task->kv_head) : kv;
  const KvAfter after_task = next_task ? blocks_from(*next_task, next_kv, next_task->first_split) : KvAfter{};
  const auto after = [&](int split) { return split < task.splits ? blocks_from(task, kv, task.first_split + split) : after_task; };
  kernels_.attend(tile, kv, task.first_split, after(1), states, mine.attend.data());
  if (joins) return;
  for (int split = 1; split < task.splits; ++split) {
    kernels_.attend(tile, kv, task.first_split + split, after(split + 1), next, mine.attend.data());
    for (int r = 0; r < rows; ++r) kernels_.merge(states + r * stride, next + r * stride, d);
  }
  finish_heads(task, states);
}

// Merges the splits of one tile, in order, into the first one's state. Tasks of a tile have consecutive states.
void Program::join(const QueryTask& first) {
  const size_t stride = state_floats(dims_.head_dim);
  float* into = &states_[first.state * kMaxQueryRows * stride];
  for (int split = 1; split < first.joined; ++split)
    for (int r = 0; r < first.tokens * first.heads; ++r)
      kernels_.merge(into + r * stride, into + (size_t(split) * kMaxQueryRows + r) * stride, dims_.head_dim);
  finish_heads(first, into);
}

void Program::rotate_and_store_all(const Instruction& instruction, const Batch& batch, int member) {
  const auto some = [&](int row, int end) {
    for (; row < end; ++row) rotate_and_store(instruction, batch, row);
  };
  if (owned(batch)) return some(first_owned(batch, member), first_owned(batch, member + 1));
  const int chunk = std::max(1, batch.rows / (kTasksPerMember * team_.size()));
  team_.share(ceil_div(batch.rows, chunk), [&](int task) { some(task * chunk, std::min(batch.rows, (task + 1) * chunk)); });
}

bool Program::run_attention(const Instruction& instruction, const Batch& batch, int member) {
  rotate_and_store_all(instruction, batch, member);
  const bool go_on = pass(Stage::Prepare, member);
  lap(Part::Rest, member);
  if (!go_on) return false;
  const std::vector<QueryTask>& tasks = plans_[instruction.group].tasks;
  const int count = static_cast<int>(tasks.size()), members = team_.active();
  team_.share(count, [&](int task) {
    attend(instruction, tasks[task], task + members < count ? &tasks[task + members] : nullptr, batch, member);
  });
  meet(Stage::Compute, member);
  if (plans_[instruction.group].joins) {
    team_.share(count, [&](int task) {
      if (tasks[task].joined) join(tasks[task]);
    });
    meet(Stage::Finish, member);
  }
  lap(Part::Attention, member);
  return true;
}

}  // namespace twostep
