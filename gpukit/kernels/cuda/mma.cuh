// Tensor cores as instructions of a warp: products of 16 x 16 and 16 x 8 tiles of bfloat16 with fp32 sums, and how tiles come to the
// registers. Needs sm_80. A *fragment* is a lane's part of a tile: of a left tile (16 x 16) four pairs, of a right tile (16 x 8) two, of a
// sum (16 x 8) four floats, which are elements [l / 4][2 (l % 4)], the next in the row, and the same two eight rows below, l being the lane.

#pragma once

#include "gpukit.cuh"

// sum += left * right
__device__ __forceinline__ void multiply_tiles(float (&sum)[4], const unsigned (&left)[4], unsigned right_low, unsigned right_high)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
}

// The same where it is wanted, by all lanes or by none, without a branch.
__device__ __forceinline__ void multiply_tiles(float (&sum)[4], const unsigned (&left)[4], unsigned right_low, unsigned right_high, bool is_wanted)
{
    asm volatile("{\n.reg .pred is_wanted;\nsetp.ne.u32 is_wanted, %10, 0;\n"
                 "@is_wanted mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n}"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high), "r"(static_cast<int>(is_wanted)));
}

// Four 8 x 8 matrices from shared memory: lane l names row l % 8 of matrix l / 8, sixteen bytes at a multiple of sixteen.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Fragments of the 16 x 16 tile at [row][column] of a matrix in shared memory. As a right operand the tile is two of 16 x 8: their
// fragments are parts 0, 1 and 2, 3.
template <int WIDTH>
__device__ __forceinline__ const unsigned short* name_row(const unsigned short (*matrix)[WIDTH], int row, int column, int lane, int below, int beside)
{
    return &matrix[row + lane % 8 + 8 * below][column + 8 * beside];
}

// The matrix is [row of the left operand][what is summed over].
template <int WIDTH>
__device__ __forceinline__ void load_left(unsigned (&to)[4], const unsigned short (*matrix)[WIDTH], int row, int column, int lane)
{
    load_matrices(to, name_row(matrix, row, column, lane, lane / 8 % 2, lane / 16));
}

// The matrix is [what is summed over][row of the left operand].
template <int WIDTH>
__device__ __forceinline__ void load_left_transposed(unsigned (&to)[4], const unsigned short (*matrix)[WIDTH], int row, int column, int lane)
{
    load_transposed(to, name_row(matrix, row, column, lane, lane / 16, lane / 8 % 2));
}

// The matrix is [what is summed over][column of the right operand].
template <int WIDTH>
__device__ __forceinline__ void load_right(unsigned (&to)[4], const unsigned short (*matrix)[WIDTH], int row, int column, int lane)
{
    load_transposed(to, name_row(matrix, row, column, lane, lane / 8 % 2, lane / 16));
}

// The matrix is [column of the right operand][what is summed over].
template <int WIDTH>
__device__ __forceinline__ void load_right_transposed(unsigned (&to)[4], const unsigned short (*matrix)[WIDTH], int row, int column, int lane)
{
    load_matrices(to, name_row(matrix, row, column, lane, lane / 16, lane / 8 % 2));
}
